"""Swaps the backbones of MMDetection's zoo for those with layer attention, and trains each detector one step.

    python tools/swap_backbones.py                                     # the whole zoo: hours
    python tools/swap_backbones.py 'faster_rcnn/*' 'detr/*' --limit 10

Only the backbone's type changes, ResNet to KCLAResNet and so on. A config is ok when the loss on small random images
is finite and every backbone parameter that should learn gets a gradient. One that fails without the swap too is
skipped.
"""
import argparse
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from copy import deepcopy
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import mmdet
import numpy as np
import torch
from kcla_mm.cli import dicts
from mmdet.registry import MODELS
from mmdet.testing import demo_mm_inputs, demo_mm_proposals, demo_track_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope

FAMILIES = 'ResNet', 'ResNetV1d', 'ResNeXt', 'Res2Net', 'ResNeSt', 'RegNet'
ZOO = Path(mmdet.__file__).parent / '.mim'
register_all_modules(init_default_scope=False)  # here, not again in each process


def main():
    args = parse_args()
    warnings.simplefilter('ignore')
    os.chdir(ZOO)  # some configs name others by their path from here
    found = [path.relative_to(ZOO / 'configs') for path in sorted((ZOO / 'configs').rglob('*.py'))]
    names = [str(path) for path in found if '_base_' not in path.parts
             and any(fnmatch(str(path), pattern) for pattern in args.patterns)]
    if not names:
        sys.exit(f'error: none of the {len(found)} configs in {ZOO / "configs"} matches {" ".join(args.patterns)}')
    print(f'Reading {len(names)} configs ...', flush=True)
    names = [name for name in names if has_backbone(name)]
    print(f'{len(names)} of them have a backbone of type {", ".join(FAMILIES)}', flush=True)
    if args.limit and args.limit < len(names):
        names = [names[i * len(names) // args.limit] for i in range(args.limit)]
    if args.list:
        print(*names, sep='\n')
        return

    counts = Counter()
    start = time.time()
    for i, name in enumerate(names):
        left = f'{(time.time() - start) / i * (len(names) - i) / 60:.0f} min left' if i else '... min left'
        result, reason = run_apart(check, name, args.size)
        counts[result] += 1
        print(f'[{i + 1}/{len(names)}, {left}] {result:7} {name}{reason and ": " + reason}', flush=True)
    print(', '.join(f'{counts[result]} {result}' for result in ('ok', 'failed', 'skipped')))
    sys.exit(counts['failed'] > 0)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('patterns', nargs='*', default=['*'], metavar='PATTERN',
                        help="names within the zoo such as 'detr/*' (default: all)")
    parser.add_argument('--limit', type=int, help='run no more than this many, spread evenly over those that match')
    parser.add_argument('--size', type=int, default=128, help='height and width of the images (default: 128)')
    parser.add_argument('--list', action='store_true', help='only list what would be run')
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        parser.error(f'--limit must be at least 1, got {args.limit}')
    return args


def read(name):
    """A zoo config, such as 'detr/detr_r50_8xb2-150e_coco.py'."""
    return Config.fromfile(ZOO / 'configs' / name)


def has_backbone(name):
    try:
        return bool(swap(read(name).get('model')))
    except Exception:
        print(f'passing over {name}, which cannot be read: {last_error()}', flush=True)
        return False


def swap(model):
    """Swaps the backbones of a model's config, in place. Returns how many there were."""
    backbones = [node['backbone'] for _, node in dicts(model) if isinstance(node.get('backbone'), dict)]
    backbones = [backbone for backbone in backbones if backbone.get('type') in FAMILIES]
    for backbone in backbones:
        backbone['type'] = 'KCLA' + backbone['type']
    return len(backbones)


def run_apart(function, *args):
    """The result of a function that is run in a process of its own, so that a crash there ends nothing else."""
    context = multiprocessing.get_context('fork')  # fork: the imports are not repeated
    receiver, sender = context.Pipe(duplex=False)

    def run():
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        sender.send(function(*args))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        killed = ', killed for lack of memory?' if process.exitcode == -9 else ''
        return 'failed', f'its process ended with exit code {process.exitcode}{killed}'
    finally:
        process.join()


def check(name, size=128):
    """Trains a zoo config one step with its backbones swapped.

    Args:
        name (str): The config's name in the zoo.
        size (int): Height and width of the images. Defaults to 128.

    Returns:
        tuple[str, str]: 'ok', 'failed' or 'skipped', and why.
    """
    try:
        unused = train_step(name, size, swapped=True)
    except Exception:
        reason = last_error()
        try:
            train_step(name, size, swapped=False)
        except Exception:
            return 'skipped', f'fails without the swap too: {last_error()}'
        return 'failed', reason
    if unused:  # a plain network may have blocks, too, that no loss depends on
        plain = {block(parameter) for parameter in train_step(name, size, swapped=False)}
        unused = [parameter for parameter in unused if block(parameter) not in plain]
    return ('failed', f'without gradient: {", ".join(unused)}') if unused else ('ok', '')


def block(parameter):
    """'backbone.layer4.0' of a parameter such as 'backbone.layer4.0.conv1.weight'."""
    parts = parameter.split('.')
    return '.'.join(parts[:parts.index('backbone') + 3])


def last_error():
    """The exception being handled, in one line."""
    kind, error, trace = sys.exc_info()
    frame = traceback.extract_tb(trace)[-1]
    message = ' '.join(str(error).split())
    return f'{kind.__name__}: {message[:300]} ({Path(frame.filename).name}:{frame.lineno})'


def train_step(name, size, swapped):
    """Trains a zoo config one step. Returns names of trainable backbone parameters that got no gradient."""
    cfg = read(name)
    if 'data_preprocessor' in cfg:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    shrink(cfg.model, size)
    if swapped:
        swap(cfg.model)
    with DefaultScope.overwrite_default_scope('mmdet'):
        return _train_step(cfg, size)


def _train_step(cfg, size):
    torch.manual_seed(0)
    np.random.seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    model.train()
    cfg.optim_wrapper.type = 'OptimWrapper'  # mixed precision needs a GPU
    for option in 'loss_scale', 'dtype':
        cfg.optim_wrapper.pop(option, None)
    optim_wrapper = build_optim_wrapper(model, cfg.optim_wrapper)

    data = model.data_preprocessor(random_batch(cfg.model, size), training=True)
    loss, log_vars = model.parse_losses(model(**data, mode='loss'))
    if not loss.isfinite():
        raise ValueError(f'the loss is {({name: float(value) for name, value in log_vars.items()})}')
    optim_wrapper.backward(loss)
    backbone = {name: parameter.grad for name, parameter in model.named_parameters()
                if 'backbone' in name.split('.') and parameter.requires_grad}
    for parameter, grad in backbone.items():
        if grad is not None and not grad.isfinite().all():
            raise ValueError(f'the gradient of {parameter} is not finite')
    optim_wrapper.step()
    return [parameter for parameter, grad in backbone.items() if grad is None]


def shrink(model, size):
    """Takes out of a model's config what needs files, and makes it fit small images."""
    for _, node in dicts(model):
        init_cfg = node.get('init_cfg')
        if isinstance(init_cfg, dict) and init_cfg.get('type') == 'Pretrained':
            node['init_cfg'] = None
        for option in 'pretrained', 'teacher_ckpt':
            if option in node:
                node[option] = None
        if 'num_queries' in node:  # no more than positions in the feature maps
            node['num_queries'] = min(node['num_queries'], size * size // 256)
        if node.get('type') == 'BatchFixedSizePad':
            node['size'] = (size, size)


def random_batch(model, size):
    """Random images and all the kinds of ground truth that a model may want."""
    classes = min((node['num_classes'] for _, node in dicts(model) if node.get('num_classes')), default=10)
    shape = (3, size, size)
    preprocessor = model.data_preprocessor.type
    if preprocessor == 'TrackDataPreprocessor':
        return demo_track_inputs(num_frames=2, key_frames_inds=[0], image_shapes=shape, with_mask=True)
    batch = demo_mm_inputs(
        image_shapes=shape, num_items=[3, 2], num_classes=min(classes, 10) + 1, with_mask=True, with_semantic=True,
        sem_seg_output_strides=8 if 'semantic_roi_extractor' in model.get('roi_head', {}) else 1)
    for sample, proposals in zip(batch['data_samples'], demo_mm_proposals([shape] * 2, 20)):
        sample.gt_instances.labels -= 1  # it makes them from 1
        sample.proposals = proposals
        sample.set_metainfo(dict(homography_matrix=np.eye(3, dtype=np.float32)))
    if preprocessor == 'MultiBranchDataPreprocessor':
        return {key: {branch: deepcopy(value) for branch in ('sup', 'unsup_teacher', 'unsup_student')}
                for key, value in batch.items()}
    return batch


if __name__ == '__main__':
    main()
