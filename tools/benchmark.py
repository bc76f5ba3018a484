"""Compares what layer attentions cost, next to the plain network.

    python tools/benchmark.py --depths 50 101
    python tools/benchmark.py --time --batch 8 --attentions KCLA KCLA,with_cp=True MRLALight --out work_dirs/cost
    python tools/benchmark.py --backbones mmpretrain.KCLAResNet_CIFAR --depths 20 56 110 --size 32 --batch 8 --time \\
        --out work_dirs/depth

Counted:

    parameters
    multiply-adds      of one image: convolutions, linear layers, matrix products, normalisations and products of single
                       elements
    carried state      the most that one block hands on to the next
    activation memory  what a training forward pass leaves in memory: its outputs and what the backward pass needs, with
                       recomputation (with_cp=True) too; no parameters, gradients or states of random generators
    peak memory        of a training step with parameters and gradients, on a GPU

and with --time:

    inference          a forward pass in eval mode, without gradients
    training step      forward and backward pass in train mode, of the sum of the means of all outputs; normalisations
                       are trained, too (norm_eval=False). No optimizer

Networks of the same depth are timed in turns, in each round in another order, after a round that does not count. Given
are the medians, and in brackets the medians of the rounds' ratios to the first network. Images are random.

A backbone or an attention can have options: mmdet.KCLAResNet,with_cp=True or KCLA,gate=False,norm_cfg.type=GN.

--out writes what there is so far to benchmark.json, and plots after each depth. The same command goes on after an
interruption, with the depths that are missing, and with other depths adds those.
"""
import gc
import json
import os
import random
import re
import sys
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from kcla_mm.backbones import FRAMEWORKS
from kcla_mm.cli import user_errors
from kcla_mm.layer_attention import LAYER_ATTENTIONS, BaseLayerAttention
from matplotlib.figure import Figure
from mmengine.analysis import FlopAnalyzer
from mmengine.analysis.jit_handles import elementwise_flop_counter
from mmengine.config import Config, DictAction
from mmengine.registry import MODELS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.benchmark import timer

PRODUCTS = 'mul', 'mul_', 'addcmul', 'addcmul_', 'lerp', 'lerp_'  # operations that multiply single elements


class Measure(NamedTuple):
    """How a measure is shown.

    Attributes:
        title (str): Its name, with the unit.
        scale (float): The unit, in that of the results.
        digits (int): Decimal places.
        plotted (bool): Whether plots show it. Defaults to True.
    """
    title: str
    scale: float
    digits: int
    plotted: bool = True


MEASURES = {  # by their names in the results
    'parameters': Measure('parameters (M)', 1e6, 2, plotted=False),
    'multiply_adds': Measure('multiply-adds (G)', 1e9, 3),
    'carried_bytes': Measure('carried state (MiB)', 2**20, 2),
    'activation_bytes': Measure('activation memory (MiB)', 2**20, 1),
    'peak_bytes': Measure('peak memory (MiB)', 2**20, 1),
    'inference_seconds': Measure('inference (ms)', 1e-3, 1),
    'images_per_second': Measure('images/s', 1, 1, plotted=False),
    'training_seconds': Measure('training step (ms)', 1e-3, 1),
}


def main():
    args = parse_args()
    with user_errors():
        run = Run(check_device(args.device, args.dtype), args.dtype, args.channels_last, args.size, args.batch)
        backbones, attentions = unique(args.backbones), unique(['none', *args.attentions])
        groups = [[Network(backbone, depth, attention) for backbone in backbones for attention in attentions]
                  for depth in unique(sum(args.depths, [])) or [None]]
        results = Results(args.out, dict(
            backbones=backbones, attentions=attentions, size=args.size, batch=args.batch, dtype=args.dtype,
            channels_last=args.channels_last, compile=args.compile, rounds=args.time, device=run.device_name,
            threads=torch.get_num_threads(), torch=torch.__version__))
    groups = [group for group in groups if not results.have(group)]
    progress = Progress(sum(network.work for group in groups for network in group)
                        * (args.time + 2 if args.time else 1))
    interrupted = False
    try:
        with user_errors():
            for network in sum(groups, []):
                progress(f'checking {network}')
                network.check(run)
        for group in groups:
            measure(group, run, args.time, args.compile, results, progress)
    except KeyboardInterrupt:
        interrupted = True
    progress.end()
    print(results.table())
    for path in results.save(plots=True):
        print(f'written: {path}')
    if interrupted:
        print('interrupted: this is what was measured before', file=sys.stderr)
        sys.exit(130)


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('--backbones', nargs='+', default=[f'{FRAMEWORKS[0]}.KCLAResNet'],
                        metavar='FRAMEWORK.TYPE[,OPTION=VALUE]',
                        help='with layer attention (default: mmdet.KCLAResNet, or of another framework)')
    parser.add_argument('--depths', nargs='+', type=depths, default=[], metavar='DEPTH',
                        help='also 20,56,110 (default: 50); not for backbones that have none, such as KCLARegNet')
    parser.add_argument('--attentions', nargs='+', default=list(LAYER_ATTENTIONS), metavar='TYPE[,OPTION=VALUE]',
                        help=f'default: {" ".join(LAYER_ATTENTIONS)}; the plain network, none, always comes first')
    parser.add_argument('--size', type=int, default=224, help='height and width of the images (default: 224)')
    parser.add_argument('--batch', type=int, default=1, help='number of images (default: 1)')
    parser.add_argument('--time', type=int, nargs='?', const=20, default=0, metavar='ROUNDS',
                        help='time inference and training, too, in so many rounds (default: 20)')
    parser.add_argument('--device', default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='such as cpu or cuda:1 (default: a GPU if there is one)')
    parser.add_argument('--dtype', choices=['float32', 'bfloat16', 'float16'], default='float32',
                        help='other than float32: autocast, as --amp trains (default: float32)')
    parser.add_argument('--channels-last', action='store_true', help='memory format of networks and images')
    parser.add_argument('--compile', action='store_true', help='time networks that torch.compile has compiled')
    parser.add_argument('--out', metavar='FOLDER', help='where results and plots are written (default: nowhere)')
    args = parser.parse_args()
    for name in 'size', 'batch':
        if getattr(args, name) < 1:
            parser.error(f'--{name} must be at least 1, got {getattr(args, name)}')
    if args.time < 0:
        parser.error(f'--time must be at least 1 round, got {args.time}')
    return args


def depths(text):
    """'20,56' -> [20, 56]."""
    return [int(depth) for depth in text.split(',')]


def unique(values):
    return list(dict.fromkeys(values))


def check_device(name, dtype):
    """The device of that name, made the current one.

    Raises:
        ValueError: If it is not there, or has no autocast to ``dtype``.
    """
    there = ['cpu', *(f'cuda:{index}' for index in range(torch.cuda.device_count()))]
    if name not in there and not (name == 'cuda' and len(there) > 1):
        raise ValueError(f'--device {name} is not there: PyTorch sees {", ".join(there)}')
    device = torch.device(name)
    if device.type == 'cuda':
        torch.cuda.set_device(device)  # the one that timers wait for
    if dtype != 'float32':
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            with torch.autocast(device.type, getattr(torch, dtype)):
                product = torch.ones(1, 1, device=device) @ torch.ones(1, 1, device=device)
        if product.dtype != getattr(torch, dtype):
            raise ValueError(f'--dtype {dtype}: PyTorch {torch.__version__} has no autocast to it on {name}')
    return device


def split_options(text):
    """'KCLA,gate=False' -> ('KCLA', {'gate': False}); options as in --cfg-options."""
    name, *options = re.split(r',(?=[\w.]+=)', text)
    parser = ArgumentParser()
    parser.add_argument('--options', nargs='*', action=DictAction, default={})
    cfg = Config()
    try:
        cfg.merge_from_dict(parser.parse_args(['--options', *options]).options)
    except AssertionError as error:  # of brackets
        raise ValueError(f'{text}: {error}') from None
    return name, cfg.to_dict()


class Network:
    """A backbone of some depth with a layer attention, as the command line names them.

    Args:
        backbone (str): Such as 'mmdet.KCLAResNet' or 'mmdet.KCLAResNet,with_cp=True'.
        depth (int, optional): None: 50 if the backbone needs a depth.
        attention (str): Such as 'KCLA' or 'KCLA,with_cp=True'; 'none' is the plain network.

    Raises:
        ValueError: If there is no such network.
    """

    def __init__(self, backbone, depth, attention):
        self.backbone, self.depth, self.attention = backbone, depth, attention
        type, options = split_options(backbone)
        known = [f'{name}.{cls}' for name in FRAMEWORKS
                 for cls in import_module(f'kcla_mm.backbones.{name}').__all__]
        if type not in known:
            raise ValueError(f'--backbones {backbone}: must be one of {", ".join(known)}, or one with ,OPTION=VALUE')
        self.config = dict(type=type, init_cfg=None, norm_eval=False, attention=None, **options)
        if attention != 'none':
            type, options = split_options(attention)
            self.config['attention'] = dict(type=type, **options)
        if depth is None:
            try:
                self.build()
            except Exception:
                self.depth = 50
        if self.depth is not None:
            self.config['depth'] = self.depth

    def __str__(self):
        return f'{self.backbone}{"" if self.depth is None else f" of depth {self.depth}"} with {self.attention}'

    @property
    def work(self):
        """About how long it takes compared with others."""
        return self.depth or 50

    def build(self):
        """The network, with the same random weights each time."""
        torch.manual_seed(0)
        return MODELS.build(dict(self.config))

    def check(self, run):
        """Builds it and trains it without computing anything.

        Raises:
            ValueError: If there is no such network, or it cannot be trained with images of that size and number.
        """
        try:
            network = self.build().to('meta')
        except Exception as error:
            depths = getattr(MODELS.get(self.config['type']), 'arch_settings', {})
            hint = f'; there are {", ".join(map(str, depths))}' if 'invalid depth' in str(error) else ''
            raise ValueError(f'{self}: {error}{hint}') from error
        try:
            train_step(network, run, torch.empty(run.batch, 3, run.size, run.size, device='meta'))
        except NotImplementedError:  # an operation that always computes
            pass
        except Exception as error:
            raise ValueError(f'{self} cannot be trained with --size {run.size} --batch {run.batch}: {error}') from error


class Run(NamedTuple):
    """What all networks are run with: arguments of these names."""
    device: torch.device
    dtype: str
    channels_last: bool
    size: int
    batch: int

    @property
    def device_name(self):
        return torch.cuda.get_device_name(self.device) if self.device.type == 'cuda' else self.device.type

    def place(self, value):
        """A network, or images, on the device and in the memory format."""
        return value.to(self.device, memory_format=torch.channels_last if self.channels_last
                        else torch.contiguous_format)

    def images(self, batch):
        """Random images, (batch, 3, size, size), the same each time."""
        return self.place(torch.rand(batch, 3, self.size, self.size, generator=torch.Generator().manual_seed(0)))

    def autocast(self):
        if self.dtype == 'float32':
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, self.dtype))


def measure(group, run, rounds, compile, results, progress):
    """Measures networks of one depth. What there is so far is saved all the time."""
    if compile:
        torch.compiler.reset()  # drops the networks of other depths
        torch._dynamo.config.cache_size_limit = 8 * len(group)  # beyond which networks would silently not be compiled
    entries, networks = results.new_group(), []
    counted = [name for name in COUNTED if name != 'peak_bytes' or run.device.type == 'cuda']
    for spec in group:
        progress(f'counting {spec}')
        entry = dict(backbone=spec.backbone, depth=spec.depth, attention=spec.attention, finished=False, failed={})
        entries.append(entry)
        network = attempt(entry, [*counted, *(TIMED if rounds else [])], lambda: run.place(spec.build()))
        if network is not None:
            for name in counted:
                entry[name] = attempt(entry, [name], COUNTED[name], network, run)
        if rounds:
            entry['rounds'] = {name: [] for name in TIMED}
        networks.append(torch.compile(network) if compile and network is not None else network)
        results.save()
        progress.add(spec.work)

    for round in range(rounds and rounds + 1):  # the first is to warm up
        for index in random.sample(range(len(group)), len(group)):
            progress(f'round {round} of {rounds}, {group[index]}')
            entry = entries[index]
            for name in TIMED.keys() - entry['failed'].keys():
                seconds = attempt(entry, [name], TIMED[name], networks[index], run, compiled=compile)
                if round and seconds is not None:
                    entry['rounds'][name].append(seconds)
            progress.add(group[index].work)
        results.save()
    for entry in entries:
        entry['finished'] = True
    results.save(plots=True)


def attempt(entry, names, function, *args, compiled=False):
    """What a function returns; None where memory does not suffice or a compiler fails, which is noted for the names."""
    try:
        return function(*args)
    except Exception as error:
        if isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "can't allocate memory" in str(error):
            failure = 'out of memory'
        elif compiled:
            failure = 'cannot be compiled'
        else:
            raise
    entry.update(dict.fromkeys(names))
    entry['failed'].update(dict.fromkeys(names, failure))
    gc.collect()
    torch.cuda.empty_cache()
    return None


def parameters(network, run=None):
    return sum(parameter.numel() for parameter in network.parameters())


def multiply_adds(network, run):
    """Those for one image."""
    network.eval()
    analysis = FlopAnalyzer(network, run.images(1))
    analysis.set_op_handle(**{f'aten::{name}': elementwise_flop_counter(0, 1) for name in PRODUCTS})
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    with torch.no_grad():  # else what is recomputed could not be traced
        return analysis.total()


def carried_bytes(network, run):
    """The largest state that a layer attention returns."""
    sizes = [0]
    handles = [module.register_forward_hook(lambda module, args, output: sizes.append(nbytes(output[1])))
               for module in network.modules() if isinstance(module, BaseLayerAttention)]
    infer(network, run, run.images(run.batch))
    for handle in handles:
        handle.remove()
    return max(sizes)


def nbytes(state):
    """Bytes of the tensors in nested tuples."""
    if torch.is_tensor(state):
        return state.numel() * state.element_size()
    return sum(map(nbytes, state)) if isinstance(state, tuple) else 0


class MemoryInUse(TorchDispatchMode):
    """Finds the memory that operations made and that is still in use.

    Hooks for saved tensors would not see what recomputation keeps, and allocators not what is a workspace of theirs.

    Args:
        others (iterable[Tensor]): Tensors from before, which do not count even if operations return them.
    """

    def __init__(self, others):
        super().__init__()
        self.others = {StorageWeakRef(tensor.untyped_storage()) for tensor in others}
        self.made = {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_flatten(result)[0]:
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def count(self):
        """Its bytes."""
        return sum(size for storage, size in self.made.items() if storage not in self.others and not storage.expired())


def activation_bytes(network, run):
    images = run.images(run.batch)
    network.train()
    with MemoryInUse([images, *network.parameters(), *network.buffers()]) as memory:
        with run.autocast():
            outputs = network(images)
    count = memory.count()
    del outputs  # until here they count
    return count


def peak_bytes(network, run):
    """On a GPU; of this network alone, whatever else is there."""
    images = run.images(run.batch)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train_step(network, run, images)
    own = [*network.parameters(), *network.buffers(), images]
    return torch.cuda.max_memory_allocated() - before + sum(map(nbytes, own))


def inference_seconds(network, run):
    images = run.images(run.batch)
    network.eval()
    start = timer()
    infer(network, run, images)
    return timer() - start


def training_seconds(network, run):
    images = run.images(run.batch)
    start = timer()
    train_step(network, run, images)
    return timer() - start


def infer(network, run, images):
    with torch.no_grad(), run.autocast():
        return network(images)


def train_step(network, run, images):
    network.train()
    try:
        with run.autocast():
            loss = sum(output.float().mean() for output in network(images))
        loss.backward()
    finally:
        network.zero_grad(set_to_none=True)


COUNTED = {'parameters': parameters, 'multiply_adds': multiply_adds, 'carried_bytes': carried_bytes,
           'activation_bytes': activation_bytes, 'peak_bytes': peak_bytes}
TIMED = {'inference_seconds': inference_seconds, 'training_seconds': training_seconds}


class Results:
    """What was measured: in a folder, if there is one.

    Args:
        folder (str, optional): Results that are there are continued.
        settings (dict): How networks are measured.

    Raises:
        ValueError: If the results there were measured with other settings.
    """

    def __init__(self, folder, settings):
        self.folder = folder and Path(folder)
        self.settings = settings
        self.groups = []  # those of a depth
        if self.folder and self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f'--out {folder} must be a folder, it is a file')
        if self.folder and self.file.exists():
            with open(self.file) as file:
                before = json.load(file)
            changed = [f'{name} {before["settings"].get(name)}, not {value}' for name, value in settings.items()
                       if before['settings'].get(name) != value]
            if changed:
                raise ValueError(f'--out {folder} has results of another benchmark, with {"; ".join(changed)}: '
                                 'take another folder, or remove them')
            size = len(settings['backbones']) * len(settings['attentions'])
            results = before['results']
            groups = [results[start:start + size] for start in range(0, len(results), size)]
            self.groups = [group for group in groups if all(entry['finished'] for entry in group)]

    @property
    def file(self):
        return self.folder / 'benchmark.json'

    def have(self, networks):
        """Whether networks have been measured."""
        names = [(network.backbone, network.depth, network.attention) for network in networks]
        return names in [[(entry['backbone'], entry['depth'], entry['attention']) for entry in group]
                         for group in self.groups]

    def new_group(self):
        self.groups.append([])
        return self.groups[-1]

    def summarise(self):
        """Puts medians and ratios into the entries."""
        self.groups.sort(key=lambda group: group[0]['depth'] or 0 if group else float('inf'))
        for group in self.groups:
            for entry in group:
                entry.update({name: median(values) for name, values in entry.get('rounds', {}).items()
                              if values and name not in entry['failed']})
                if entry.get('inference_seconds'):
                    entry['images_per_second'] = self.settings['batch'] / entry['inference_seconds']
                entry['ratios'] = {name: ratio(name, entry, group[0])
                                   for name in MEASURES if name in entry and name != 'images_per_second'}

    def save(self, plots=False):
        """Writes everything, each file whole or not at all. Returns the files that there are."""
        self.summarise()
        if not self.folder:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        results = dict(settings=self.settings, results=sum(self.groups, []))
        files = {'benchmark.json': lambda path: Path(path).write_text(json.dumps(results, indent=1) + '\n')}
        if plots and results['results']:
            files['networks.png'] = self.plot_networks
            if len(self.groups) > 1:
                files.update({'depths.png': self.plot_depths, 'ratios.png': partial(self.plot_depths, ratios=True)})
        for name, write in files.items():
            temporary = self.folder / f'unfinished_{name}'
            write(temporary)
            os.replace(temporary, self.folder / name)
        return [self.folder / name for name in files]

    def table(self):
        """Everything as a Markdown table: the first of a group as it is, the others compared with it."""
        names = self.measured()
        backbones = len(self.settings['backbones']) > 1
        head = ['backbone'] * backbones + ['depth', 'attention'] + [MEASURES[name].title for name in names]
        lines = [self.title(), '', f'| {" | ".join(head)} |', '|' + '---|' * len(head)]
        for group in self.groups:
            for entry in group:
                cells = [entry['backbone']] * backbones + [entry['depth'] or '', entry['attention']]
                cells += [cell(name, entry, group[0]) for name in names]
                lines.append(f'| {" | ".join(map(str, cells))} |')
        return '\n'.join(lines)

    def measured(self):
        """Names of the measures that there are."""
        return [name for name in MEASURES if any(name in entry for group in self.groups for entry in group)]

    def title(self):
        """What was measured, in a line."""
        settings = self.settings
        images = 'an image' if settings['batch'] == 1 else f'{settings["batch"]} images'
        options = [name.replace('_', ' ') for name in ('channels_last', 'compile') if settings[name]]
        device = settings['device']
        if device == 'cpu':
            device += ' (1 thread)' if settings['threads'] == 1 else f' ({settings["threads"]} threads)'
        backbones = settings['backbones'] if len(settings['backbones']) == 1 else []
        return ', '.join([*backbones, f'{images} of {settings["size"]} x {settings["size"]}', settings['dtype'],
                          *options, device])

    def label(self, entry):
        """What a network is called in plots."""
        return ' '.join([entry['backbone']] * (len(self.settings['backbones']) > 1) + [entry['attention']])

    def ratio_label(self):
        return f'ratio to {self.label(self.groups[0][0])}'

    def panels(self, names, height, **options):
        """A figure with a panel for each measure."""
        columns = 2 if len(names) in (2, 4) else 3
        rows = -(-len(names) // columns)
        figure = Figure(figsize=(11, height * rows + 0.8), layout='constrained')
        figure.suptitle(self.title())
        panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
        for panel in panels[len(names):]:
            panel.set_visible(False)
        return figure, panels[:len(names)]

    def plot_depths(self, path, ratios=False):
        """Costs against depth, or their ratios to those of the first network: a line for each network."""
        names = [name for name in self.measured() if MEASURES[name].plotted
                 and not (ratios and name == 'carried_bytes')]  # which the plain network has none of
        figure, panels = self.panels(names, 3.3)
        for name, panel in zip(names, panels):
            for index in range(max(map(len, self.groups))):
                line = [group[index] for group in self.groups if index < len(group)]
                costs = [entry['ratios'].get(name) if ratios else entry.get(name) for entry in line]
                points = [(entry['depth'], cost if ratios else cost / MEASURES[name].scale)
                          for entry, cost in zip(line, costs) if cost is not None]
                panel.plot(*zip(*points) if points else ([], []), label=self.label(line[0]), **self.style(index))
            panel.set(title=MEASURES[name].title.partition(' (')[0], xlabel='depth', xlim=(0, None),
                      ylabel=self.ratio_label() if ratios else MEASURES[name].title)
            panel.set_ylim(bottom=None if ratios else 0)
            panel.grid(alpha=0.3)
        figure.legend(*panels[0].get_legend_handles_labels(), loc='outside lower center', ncols=4)
        figure.savefig(path, dpi=150, format='png')

    def style(self, index):
        """How the line of a network is drawn, so that one under another is seen."""
        backbone, attention = divmod(index, len(self.settings['attentions']))
        return dict(color=f'C{attention - 1}' if attention else 'black', linestyle=['-', '--', ':', '-.'][backbone % 4],
                    marker='osD^vPX*'[attention % 8], markersize=max(9 - attention, 3), markerfacecolor='none',
                    clip_on=False)

    def plot_networks(self, path):
        """Bars of the costs of the deepest networks, their lengths the ratios to the first one's."""
        entries = ([group for group in self.groups if group and group[0]['finished']] or self.groups)[-1]
        names = [name for name in self.measured() if MEASURES[name].plotted]
        figure, panels = self.panels(names, 0.6 + 0.3 * len(entries), sharey=True)
        for name, panel in zip(names, panels):
            scale = 1 if entries[0].get(name) else MEASURES[name].scale
            lengths = [(entry['ratios'].get(name) if scale == 1 else entry.get(name)) or 0 for entry in entries]
            bars = panel.barh([self.label(entry) for entry in entries], [length / scale for length in lengths],
                              color=[self.style(index)['color'] for index in range(len(entries))])
            panel.bar_label(bars, [cell(name, entry, entries[0]) for entry in entries], padding=3, fontsize=8)
            panel.set(title=MEASURES[name].title, xlabel=self.ratio_label() if scale == 1 else '')
            panel.margins(x=0.6)
        panels[0].invert_yaxis()
        if entries[0]['depth']:
            figure.suptitle(f'{self.title()}, depth {entries[0]["depth"]}')
        figure.savefig(path, dpi=150, format='png')


def ratio(name, entry, first):
    """Of a measure, to that of the first network; None if there is none."""
    if not (entry[name] and first.get(name)):
        return None
    if name in TIMED:
        return median(a / b for a, b in zip(entry['rounds'][name], first['rounds'][name]))
    return entry[name] / first[name]


def cell(name, entry, first):
    """A measure in the table."""
    if name not in entry:
        return ''
    if entry[name] is None:
        return entry['failed'][name]
    scale, digits = MEASURES[name].scale, MEASURES[name].digits
    text = f'{entry[name] / scale:.{digits}f}'
    if entry is first or first.get(name) is None:
        return text
    if name in ('parameters', 'multiply_adds'):
        return f'{text} ({(entry[name] - first[name]) / scale:+.{digits}f})'
    return text if not entry['ratios'].get(name) else f'{text} (x {entry["ratios"][name]:.2f})'


class Progress:
    """Says on standard error what is being measured, and how long the rest may take.

    Args:
        work (float): All that there is to do.
    """

    def __init__(self, work):
        self.work, self.done = work, 0
        self.start = time.time()
        self.printed = 0.
        self.rewrite = sys.stderr.isatty()

    def add(self, work):
        self.done += work

    def __call__(self, text):
        now = time.time()
        if not self.rewrite and now - self.printed < 10:
            return
        self.printed = now
        left = (now - self.start) * (self.work / self.done - 1) if self.done else None
        left = '...' if left is None else f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'
        text = f'[{self.done / self.work:4.0%}, {left} left] {text}'
        before, end = ('\r\x1b[K', '') if self.rewrite else ('', '\n')
        print(before + text, end=end, file=sys.stderr, flush=True)

    def end(self):
        if self.rewrite:
            print('\r\x1b[K', end='', file=sys.stderr, flush=True)


if __name__ == '__main__':
    main()
