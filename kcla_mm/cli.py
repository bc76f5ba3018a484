"""What the tools share: configs by file or zoo name, and checks before anything is built."""
import copy
import os
import sys
import traceback
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.registry import MODELS, RUNNERS, DefaultScope
from mmengine.runner import CheckpointLoader, Runner
from mmengine.utils import import_modules_from_strings

from kcla_mm.errors import DataError

DOWNLOADED = 'CIFAR10', 'CIFAR100', 'MNIST', 'FashionMNIST'  # data sets of MMPretrain that download themselves

LAUNCHERS = {'pytorch': 'RANK', 'slurm': 'SLURM_PROCID', 'mpi': 'OMPI_COMM_WORLD_RANK'}  # what each sets


@contextmanager
def user_errors():
    """Ends a command on an error of its user's with the message alone, without a traceback."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f'error: {error}')


@contextmanager
def our_errors():
    """Ends a command on an error that this package raises itself, of an argument or of data, with the message alone."""
    try:
        yield
    except (ValueError, TypeError) as error:
        cause = error
        while cause.__context__:  # a registry raises it anew
            cause = cause.__context__
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        ours = Path(__file__).resolve().parent in Path(frame.filename).resolve().parents
        if not (isinstance(error, DataError) or ours and frame.line.startswith('raise')):
            raise
        print(flush=True)  # ends the line of a progress bar
        sys.exit(f'error: {error}')


def config_parser(description):
    """An argument parser with what training and testing have in common."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('config', help='a file, or a zoo name such as mmdet::retinanet/retinanet_r50_fpn_1x_coco.py or '
                        'kcla_mm::faster_rcnn_r101_kcla_coco.py')
    parser.add_argument('--work-dir', help='where logs and checkpoints go (default: work_dir of the config, or '
                        'work_dirs/ and the name of the config)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
                        help='changes to the config, such as model.backbone.type=KCLAResNet; lists as key="[a,b]"')
    parser.add_argument('--launcher', choices=['none', *LAUNCHERS], default='none',
                        help='how the processes of a distributed run were started; torchrun is pytorch '
                        '(default: none, a single process)')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0,
                        help='set by torch.distributed.launch, not by you')
    return parser


def load_config(args):
    """The config that the arguments of a `config_parser` ask for, which imports ``kcla_mm`` wherever it is read."""
    started_by = LAUNCHERS.get(args.launcher)
    if started_by and started_by not in os.environ:
        raise ValueError(f'--launcher {args.launcher}: this process was not started by it ({started_by} is not set)')
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config(args.config, args.cfg_options)
    load_as_mmpretrain(cfg)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or os.path.join('work_dirs', Path(cfg.filename).stem)
    return cfg


def load_as_mmpretrain(cfg):
    """Adds to a config of MMPretrain what its own tools add to the data loaders, where it says nothing else."""
    if cfg.get('default_scope') != 'mmpretrain':
        return
    for part in 'train', 'val', 'test':
        loading = cfg.get(f'{part}_dataloader')
        if loading:
            loading.setdefault('collate_fn', dict(type='default_collate'))
            loading.setdefault('pin_memory', torch.cuda.is_available())
            loading.setdefault('persistent_workers', loading.get('num_workers', 0) > 0)


def build_runner(cfg):
    """The runner of a config, with its processes started; several on the CPU too, where MMEngine asks for GPUs."""
    if cfg.launcher == 'pytorch' and get_device() == 'cpu':
        torch.distributed.init_process_group('gloo')
        cfg.setdefault('model_wrapper_cfg', dict(
            type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False,
            find_unused_parameters=cfg.get('find_unused_parameters', False)))
    return RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)


def build_model(cfg):
    """The model of a config, with what it imports and in its scope. The config stays as it is: models change theirs."""
    import_modules_from_strings(**cfg.custom_imports)
    model = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor'):
        model.setdefault('data_preprocessor', cfg.data_preprocessor)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
        return MODELS.build(model)


def load_weights(model, name, part=''):
    """Loads a checkpoint into a model.

    Args:
        model (nn.Module): The model.
        name (str): A file or URL.
        part (str): The model must get all its parameters whose names start so. Defaults to all of them.

    Returns:
        dict: The checkpoint.

    Raises:
        ValueError: If it cannot be read, has other shapes, or lacks parameters.
    """
    try:
        checkpoint = CheckpointLoader.load_checkpoint(name, map_location='cpu', logger=None)
        weights = checkpoint.get('state_dict', checkpoint)
        weights = {key[len('module.'):] if key.startswith('module.') else key: value for key, value in weights.items()}
        missing = model.load_state_dict(weights, strict=False).missing_keys
    except Exception as error:  # of a file that is no checkpoint it may be anything
        raise ValueError(f'the checkpoint {name} cannot be loaded into the model of the config: '
                         f'{" ".join(str(error).split())[:500]}') from None
    missing = [key for key in missing if key.startswith(part)]
    if missing:
        raise ValueError(f'the checkpoint {name} is not of the model of the config, or not of all of it: it lacks '
                         f'{len(missing)} parameters such as {", ".join(missing[:3])}')
    return checkpoint


def read_config(name, options=()):
    """Reads a config and records ``kcla_mm`` in its ``custom_imports``.

    Args:
        name (str): A file, or a name in the zoo of an installed package, such as
            ``mmdet::retinanet/retinanet_r50_fpn_1x_coco.py``.
        options (dict): Changes to it, by dotted keys. One that the config did not have is added, and said so.
            Defaults to none.

    Returns:
        Config: The config.

    Raises:
        ValueError: If it is not Python, or not a name of that kind.
    """
    try:
        cfg = Config.fromfile(Config._get_cfg_path(name, '')[0])  # as MMEngine finds a _base_
    except (SyntaxError, ValueError) as error:
        raise ValueError(f'the config {name} cannot be read: {error}') from None
    for key in options:
        if not _has(cfg, key):
            print_log(f'--cfg-options: {key} is not in {name}, it is added')
    cfg.merge_from_dict(dict(options))
    custom = cfg.get('custom_imports') or dict(imports=[])
    imports = [custom['imports']] if isinstance(custom['imports'], str) else list(custom['imports'])
    if 'kcla_mm' not in imports:
        cfg.custom_imports = dict(custom, imports=[*imports, 'kcla_mm'])
    return cfg


def _has(node, key):
    for part in key.split('.'):
        try:
            node = node[int(part) if isinstance(node, (list, tuple)) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return False
    return True


def dicts(node, where=''):
    """Every dict within a config, as pairs of its dotted key and the dict."""
    if isinstance(node, dict):
        yield where, node
        children = list(node.items())
    else:
        children = list(enumerate(node)) if isinstance(node, (list, tuple)) else ()
    for key, child in children:
        yield from dicts(child, f'{where}.{key}' if where else str(key))


def check_files(cfg, *parts):
    """Checks that the files and folders which a config names are there, before anything is built.

    They are the annotation files and folders of data sets (also within wrappers such as ``RepeatDataset``) and
    evaluators, and checkpoints. A path elsewhere, a URL or one read through ``backend_args``, is left to the framework.

    Args:
        cfg (Config): The config.
        *parts (str): The entries to look at, such as 'train_dataloader', 'val_evaluator', 'model' or 'load_from'.

    Raises:
        FileNotFoundError: If one is missing. The message lists all that should be there.
    """
    paths = {}
    for part in parts:
        if isinstance(cfg.get(part), str):
            paths[cfg[part]] = part
        for where, node in dicts(cfg.get(part), part):
            for key, path in _paths(node):
                paths.setdefault(path, f'{where}.{key}')
    paths = {path: where for path, where in paths.items() if path and '://' not in path}
    missing = [path for path in paths if not os.path.exists(os.path.expanduser(path))]
    if missing:
        width = max(map(len, paths))
        lines = [f'    {"missing" if path in missing else "found  "}  {path:{width}}  {paths[path]}'
                 for path in sorted(paths)]
        data = any(not paths[path].endswith(('load_from', 'checkpoint')) for path in missing)
        raise FileNotFoundError(
            f'{missing[0]} does not exist. Looked, in {os.getcwd()}, for\n' + '\n'.join(lines) +
            ('\nPut what is missing there, or link it (ln -s /path/of/coco data/coco), or change an entry with '
             '--cfg-options.' if data else ''))


def _paths(node):
    """Pairs of key and path that a dict of a config names."""
    if node.get('type') == 'Pretrained':
        yield 'checkpoint', node.get('checkpoint', '')
    if node.get('backend_args') or node.get('type') in DOWNLOADED and node.get('download', True):
        return
    named = {'ann_file': node.get('ann_file'), 'seg_prefix': node.get('seg_prefix')}
    prefix = node.get('data_prefix')
    if isinstance(prefix, dict):
        named.update({f'data_prefix.{key}': value for key, value in prefix.items()})
    elif prefix or named['ann_file']:
        named['data_prefix'] = prefix
    elif node.get('data_root'):  # a data set that knows where in there its files are, such as ImageNet
        named['data_root'] = ''
    for key, path in named.items():
        if isinstance(path, str) and (path or key != 'ann_file'):
            yield key, path if '://' in path else os.path.join(node.get('data_root') or '', path)
