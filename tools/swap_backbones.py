"""Swaps the backbones of a framework's zoo for those with layer attention, and trains each model one step.

    python tools/swap_backbones.py                                     # the whole zoo of MMDetection: hours
    python tools/swap_backbones.py 'faster_rcnn/*' 'detr/*' --limit 10
    python tools/swap_backbones.py --zoo mmseg 'pspnet/*'
    python tools/swap_backbones.py --zoo mmpretrain 'resnet/*' 'simclr/*'

Only the backbone's type changes, ResNet to KCLAResNet and so on. A config is ok when the loss on small random images
is finite and every backbone parameter that should learn gets a gradient. One that fails without the swap too is
skipped. One that is refused cannot have layer attention, and says so: it runs the stages of its backbone by hand, as
ICNet does.
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
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Callable, NamedTuple

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
import torch
from kcla_mm.cli import dicts, user_errors
from kcla_mm.frameworks import check_version
from mmengine.config import Config
from mmengine.logging import MessageHub
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope


def main():
    args = parse_args()
    warnings.simplefilter('ignore')
    with user_errors():
        load(args.zoo)
    configs = folder(args.zoo) / 'configs'
    os.chdir(folder(args.zoo))  # some configs name others by their path from here
    found = [path.relative_to(configs) for path in sorted(configs.rglob('*.py'))]
    names = [str(path) for path in found if '_base_' not in path.parts
             and any(fnmatch(str(path), pattern) for pattern in args.patterns)]
    if not names:
        sys.exit(f'error: none of the {len(found)} configs in {configs} matches {" ".join(args.patterns)}')
    print(f'Reading {len(names)} configs ...', flush=True)
    names = [name for name in names if has_backbone(name, args.zoo)]
    print(f'{len(names)} of them have a backbone of type {", ".join(ZOOS[args.zoo].families)}', flush=True)
    if args.limit and args.limit < len(names):
        names = [names[i * len(names) // args.limit] for i in range(args.limit)]
    if args.list:
        print(*names, sep='\n')
        return

    counts = Counter(ok=0, failed=0, skipped=0)
    start = time.time()
    for i, name in enumerate(names):
        left = f'{(time.time() - start) / i * (len(names) - i) / 60:.0f} min left' if i else '... min left'
        result, reason = run_apart(check, name, args.size, args.zoo)
        counts[result] += 1
        print(f'[{i + 1}/{len(names)}, {left}] {result:7} {name}{reason and ": " + reason}', flush=True)
    print(', '.join(f'{count} {result}' for result, count in counts.items()))
    sys.exit(counts['failed'] > 0)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('patterns', nargs='*', default=['*'], metavar='PATTERN',
                        help="names within the zoo such as 'detr/*' (default: all)")
    parser.add_argument('--zoo', choices=ZOOS, default='mmdet', help='whose configs (default: mmdet)')
    parser.add_argument('--limit', type=int, help='run no more than this many, spread evenly over those that match')
    parser.add_argument('--size', type=int, default=128, help='height and width of the images (default: 128)')
    parser.add_argument('--list', action='store_true', help='only list what would be run')
    args = parser.parse_args()
    if args.limit is not None and args.limit < 1:
        parser.error(f'--limit must be at least 1, got {args.limit}')
    return args


def load(zoo):
    """Imports all of a framework: once, not again in each process.

    Raises:
        ImportError: If it is missing, does not fit or does not import.
    """
    check_version(zoo)
    import_module(f'{zoo}.utils').register_all_modules(init_default_scope=False)


def folder(zoo):
    """Where a framework keeps its configs."""
    return Path(find_spec(zoo).origin).parent / '.mim'


def read(name, zoo):
    """A zoo config, such as 'detr/detr_r50_8xb2-150e_coco.py'."""
    return Config.fromfile(folder(zoo) / 'configs' / name)


def has_backbone(name, zoo):
    try:
        return bool(swap(read(name, zoo).get('model'), ZOOS[zoo].families))
    except Exception:
        print(f'passing over {name}, which cannot be read: {last_error()}', flush=True)
        return False


def swap(model, families):
    """Swaps the backbones of a model's config, in place. Returns how many there were."""
    backbones = [node[key] for _, node in dicts(model) for key in ('backbone', 'backbone_cfg')
                 if isinstance(node.get(key), dict)]
    backbones = [backbone for backbone in backbones if backbone.get('type') in families]
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


def check(name, size=128, zoo='mmdet'):
    """Trains a zoo config one step with its backbones swapped.

    Args:
        name (str): The config's name in the zoo.
        size (int): Height and width of the images. Defaults to 128.
        zoo (str): Whose config it is. Defaults to 'mmdet'.

    Returns:
        tuple[str, str]: 'ok', 'failed', 'skipped' or 'refused', and why.
    """
    try:
        unused = train_step(name, size, zoo, swapped=True)
    except Exception:
        reason = last_error()
        try:
            train_step(name, size, zoo, swapped=False)
        except Exception:
            return 'skipped', f'fails without the swap too: {last_error()}'
        if 'was called by hand' in reason:
            return 'refused', 'cannot work: runs the stages of its backbone by hand'
        return 'failed', reason
    if unused:  # a plain network may have blocks, too, that no loss depends on
        plain = {block(parameter) for parameter in train_step(name, size, zoo, swapped=False)}
        unused = [parameter for parameter in unused if block(parameter) not in plain]
    return ('failed', f'without gradient: {", ".join(unused)}') if unused else ('ok', '')


def block(parameter):
    """'backbone.layer4.0' of a parameter such as 'backbone.layer4.0.conv1.weight'."""
    before, _, within = parameter.rpartition('backbone.')
    return f'{before}backbone.{".".join(within.split(".")[:2])}'


def last_error():
    """The exception being handled, in one line."""
    kind, error, trace = sys.exc_info()
    frame = traceback.extract_tb(trace)[-1]
    message = ' '.join(str(error).split())
    return f'{kind.__name__}: {message[:300]} ({Path(frame.filename).name}:{frame.lineno})'


def train_step(name, size, zoo, swapped):
    """Trains a zoo config one step. Returns names of trainable backbone parameters that got no gradient."""
    cfg = read(name, zoo)
    zoo = cfg.get('default_scope', zoo)  # MMPretrain has detectors of MMDetection, too
    if 'data_preprocessor' in cfg:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    shrink(cfg.model, size)
    if swapped:
        swap(cfg.model, ZOOS[zoo].families)
    with DefaultScope.overwrite_default_scope(zoo):
        return _train_step(cfg, size, ZOOS[zoo].random_batch)


def _train_step(cfg, size, random_batch):
    torch.manual_seed(0)
    np.random.seed(0)
    for progress, value in dict(epoch=0, iter=0, max_iters=1).items():  # which some heads and moving averages read
        MessageHub.get_current_instance().update_info(progress, value)
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
        if node.get('type') == 'MMSyncBN':
            node['type'] = 'SyncBN'  # which a single process can use, too
        if node.get('type') in ('BatchFixedSizePad', 'SegDataPreProcessor'):
            node['size'] = (size, size)


def fewest_classes(model):
    """The number of classes of a model, or of the part of it that knows the fewest; 10 at most."""
    return min([10] + [node['num_classes'] for _, node in dicts(model) if node.get('num_classes')])


def detection_batch(model, size):
    """Random images and all the kinds of ground truth that a detector may want."""
    from mmdet.testing import demo_mm_inputs, demo_mm_proposals, demo_track_inputs
    shape = (3, size, size)
    preprocessor = model.data_preprocessor.type
    if preprocessor == 'TrackDataPreprocessor':
        return demo_track_inputs(num_frames=2, key_frames_inds=[0], image_shapes=shape, with_mask=True)
    batch = demo_mm_inputs(
        image_shapes=shape, num_items=[3, 2], num_classes=fewest_classes(model) + 1, with_mask=True, with_semantic=True,
        sem_seg_output_strides=8 if 'semantic_roi_extractor' in model.get('roi_head', {}) else 1)
    for sample, proposals in zip(batch['data_samples'], demo_mm_proposals([shape] * 2, 20)):
        sample.gt_instances.labels -= 1  # it makes them from 1
        sample.proposals = proposals
        sample.set_metainfo(dict(homography_matrix=np.eye(3, dtype=np.float32)))
    if preprocessor == 'MultiBranchDataPreprocessor':
        return {key: {branch: deepcopy(value) for branch in ('sup', 'unsup_teacher', 'unsup_student')}
                for key, value in batch.items()}
    return batch


def segmentation_batch(model, size):
    """Random images and their classes, a stripe of which is to be ignored."""
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample
    samples = []
    for _ in range(2):
        labels = torch.randint(fewest_classes(model), (1, size, size))
        labels[..., :size // 8] = 255
        samples.append(SegDataSample(metainfo=dict(img_shape=(size, size), ori_shape=(size, size)),
                                     gt_sem_seg=PixelData(data=labels)))
    return dict(inputs=[torch.randint(256, (3, size, size)) for _ in samples], data_samples=samples)


def classification_batch(model, size):
    """Random images and their classes, or views of images for a model that learns without classes."""
    from mmpretrain.structures import DataSample
    samples = [DataSample().set_gt_label(label) for label in torch.randint(fewest_classes(model), (2, ))]
    views = 1
    if 'num_classes' not in model.head:
        views = sum(next((node['num_crops'] for _, node in dicts(model) if 'num_crops' in node), [2]))
    inputs = [torch.randint(256, (len(samples), 3, size, size)) for _ in range(views)]
    return dict(inputs=inputs if views > 1 else inputs[0], data_samples=samples)


class Zoo(NamedTuple):
    """The configs of a framework.

    Attributes:
        families (tuple[str]): Types of the backbones to which 'KCLA' can be put in front.
        random_batch (callable): Makes a batch for a model from its config and the size of the images.
    """
    families: tuple
    random_batch: Callable


ZOOS = {  # by the name of the package, which is its scope too
    'mmdet': Zoo(('ResNet', 'ResNetV1d', 'ResNeXt', 'Res2Net', 'ResNeSt', 'RegNet'), detection_batch),
    'mmseg': Zoo(('ResNet', 'ResNetV1c', 'ResNetV1d', 'ResNeXt', 'ResNeSt'), segmentation_batch),
    # not ResNet_CIFAR: MMPretrain's is a wide network of four stages, KCLAResNet_CIFAR a narrow one of three
    'mmpretrain': Zoo(('ResNet', 'ResNetV1c', 'ResNetV1d', 'ResNeXt', 'SEResNet'), classification_batch),
}

if __name__ == '__main__':
    main()
