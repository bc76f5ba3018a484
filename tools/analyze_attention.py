"""Analyses what the layer attention of a model attends to, on real images: figures, a JSON file and a summary.

    python tools/analyze_attention.py configs/unet_kcla_kvasir.py epoch_300.pth --part val --num 30 --out-dir analysis
    python tools/analyze_attention.py configs/faster_rcnn_r50_kcla_coco.py epoch_12.pth --images photos --out-dir coco
    python tools/analyze_attention.py configs/unet_kcla_kvasir.py none --part val --num 30 --out-dir untrained

It runs the backbone, in eval mode, on images as the config's own pipeline prepares them, one by one. All numbers are
averages over them. In DIR:

key_alignment.png, key_alignment_stage1.png, ...
    cosine similarity of the keys of a stage's blocks, the mean over heads (with mean and spread, over images, of all
    pairs of blocks), and head by head
depth_weights.png, depth_weights_heads.png
    how much of each earlier block's output is in what a block reads: for all blocks, and head by head for the last of
    each stage. Of MRLALight it is the products of |lambda|, divided by their sum; DLALight has no such weights
softmax.png
    KCLA's weights, divided by their sum over the stage, beside softmax attention with the same queries and keys:
    total variation distance, KL divergence of softmax from KCLA, Spearman's rank correlation
heads.png
    gates, temperatures and scores of the heads over depth
memory.png
    how much layer attention adds to each block's output x, ||y - x|| / ||x||, and how much the backbone's outputs
    change when KCLA's memory of earlier stages is cut off where a stage starts
analysis.json
    the numbers of all of these; "std" is over the images
"""
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cv2
import infer
import numpy as np
import torch
from kcla_mm.analysis import find_backbone
from kcla_mm.analysis.analyse import Analysis, calibrate
from kcla_mm.analysis.figures import draw
from kcla_mm.cli import build_model, check_files, dicts, load_weights, our_errors, read_config, user_errors
from mmengine.config import DictAction
from mmengine.dataset import Compose, pseudo_collate
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, init_default_scope
from mmengine.runner import set_random_seed
from mmengine.utils import track_iter_progress

DEFAULT_NUM = 30
UNTRAINED = 'none'


def main():
    with user_errors():
        args = parse_args()
        cfg = read_config(args.config, args.cfg_options)
        check_arguments(cfg, args)
    with our_errors():
        init_default_scope(cfg.get('default_scope', 'mmengine'))
        set_random_seed(cfg.get('randomness', {}).get('seed') or 0)
        model = build_model(cfg)
        backbone = find_backbone(model)
    with user_errors():
        if args.checkpoint == UNTRAINED:
            model.init_weights()
        else:
            name = next(name for name, module in model.named_modules() if module is backbone)
            load_weights(model, args.checkpoint, part=name and f'{name}.')
    model = revert_sync_batchnorm(model).to(args.device or get_device())
    model.eval()
    with our_errors():
        images = Images(cfg, args, model)
        if args.checkpoint == UNTRAINED:
            print('Taking the BatchNorm statistics of the untrained network from the images')
            calibrate(backbone, track_iter_progress((images, len(images))))
        print(f'\nAnalysing {type(backbone).__name__} on {len(images)} images')
        analysis = Analysis(backbone)
        for inputs in track_iter_progress((images, len(images))):
            analysis.add(inputs)
    result = dict(config=args.config, checkpoint=args.checkpoint, backbone=type(backbone).__name__,
                  attention=type(analysis.records[0].layer).__name__, images=images.names, **analysis.result())
    out_dir = Path(args.out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / 'analysis.json').write_text(json.dumps(result))
    names = [path.name for path in draw(result, out_dir)]
    print(f'\n\n{summary(result)}\n\nIn {out_dir}: analysis.json, {", ".join(names)}')


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('config', help='a file, or a zoo name such as kcla_mm::faster_rcnn_r101_kcla_coco.py')
    parser.add_argument('checkpoint', help=f'a file or URL; {UNTRAINED}: the network as its config initialises it, '
                        'its BatchNorm statistics taken from the images')
    images = parser.add_mutually_exclusive_group(required=True)
    images.add_argument('--images', nargs='+', metavar='IMAGE',
                        help="image files, or folders of them, through the config's test pipeline")
    images.add_argument('--part', choices=['train', 'val', 'test'],
                        help='images of this data set of the config, through its pipeline')
    parser.add_argument('--num', type=int, metavar='N',
                        help=f'number of images, spaced evenly (default: all of --images, {DEFAULT_NUM} of a --part)')
    parser.add_argument('--out-dir', required=True, metavar='DIR', help='where the results go')
    parser.add_argument('--device', help='such as cuda:0 or cpu (default: a GPU if there is one)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
                        help='changes to the config')
    return parser.parse_args()


def check_arguments(cfg, args):
    if args.num is not None and args.num < 1:
        raise ValueError(f'--num must be a positive integer, got {args.num}')
    if Path(args.out_dir).is_file():
        raise NotADirectoryError(f'--out-dir {args.out_dir} is a file')
    if args.device and args.device.startswith('cuda') and not torch.cuda.is_available():
        raise ValueError(f'--device {args.device}: PyTorch sees no GPU')
    loader = f'{args.part or "test"}_dataloader'
    if not cfg.get(loader):
        raise ValueError(f'the config has no {loader}, which --{"part " + args.part if args.part else "images"} needs')
    parts = ['model'] if args.checkpoint == UNTRAINED else ['load_from']
    cfg.load_from = args.checkpoint
    if args.images:
        args.images = infer.find_images(args.images)
        for path in args.images:
            if not path.exists():
                raise FileNotFoundError(f'{path} does not exist')
            if cv2.imread(str(path), cv2.IMREAD_REDUCED_GRAYSCALE_8) is None:
                raise ValueError(f'{path} is not an image that can be read')
    else:
        parts.append(loader)
    check_files(cfg, *parts)


class Images:
    """Images as the backbone gets them, (1, 3, H, W)."""

    def __init__(self, cfg, args, model):
        if args.images:
            pipeline = test_pipeline(cfg)
            found, self.load = args.images, lambda path: pipeline(dict(img_path=str(path), img_id=0))
        else:
            dataset = DATASETS.build(cfg[f'{args.part}_dataloader'].dataset)
            found, self.load = range(len(dataset)), dataset.__getitem__
        number = min(len(found), args.num or (len(found) if args.images else DEFAULT_NUM))
        self.found = [found[int(index)] for index in np.linspace(0, len(found) - 1, number).round()]
        self.names = [str(item) for item in self.found]
        self.model = model

    def __len__(self):
        return len(self.found)

    def __iter__(self):
        for index, item in enumerate(self.found):
            sample = self.load(item)
            self.names[index] = getattr(sample['data_samples'], 'img_path', None) or self.names[index]
            with torch.no_grad():
                inputs = self.model.data_preprocessor(pseudo_collate([sample]), False)['inputs']
            yield inputs


def test_pipeline(cfg):
    """The transforms of the test data that are for the image, not for its annotations."""
    steps = next(node['pipeline'] for _, node in dicts(cfg.test_dataloader.dataset) if 'pipeline' in node)
    names = [step['type'] if isinstance(step['type'], str) else step['type'].__name__ for step in steps]
    steps = [step for step, name in zip(steps, names) if 'Image' in name or not name.split('.')[-1].startswith('Load')]
    if not any('LoadImage' in name for name in names):  # data sets that hold their images, such as CIFAR-100
        steps = [dict(type='LoadImageFromFile'), *steps]
    return Compose(steps)


def summary(result):
    """The numbers of each stage, as a table."""
    columns = {
        'key alignment': lambda stage, layers: _pm(stage['key_alignment'] and stage['key_alignment']['pairs']),
        '|cosine|': lambda stage, layers: _pm(stage['key_alignment'] and stage['key_alignment']['absolute']),
        'first block': lambda stage, layers: _pm(stage['first_block']),
        'earlier stages': lambda stage, layers: _pm(stage['earlier_stages']),
        'TV': lambda stage, layers: _mean(layers, 'total_variation'),
        'KL': lambda stage, layers: _mean(layers, 'kl_divergence'),
        'rank corr.': lambda stage, layers: _mean(layers, 'rank_correlation'),
        'gate': lambda stage, layers: _mean(layers, 'gate'),
        '|y - x| / |x|': lambda stage, layers: _mean(layers, 'branch', '.3g'),
        'cut': lambda stage, layers: '-' if stage['cut'] is None else f'{stage["cut"]["mean"][-1]:.3g}',
    }
    rows = [['stage', *columns]]
    for stage in result['stages']:
        layers = [layer for layer in result['layers'] if layer['stage'] == stage['stage']]
        rows.append([str(stage['stage']), *(cell(stage, layers) for cell in columns.values())])
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)
    return (f'{result["attention"]} in {result["backbone"]}, {len(result["images"])} images\n\n{table}\n\n'
            'key alignment: mean cosine similarity of all pairs of blocks, ± its spread over images; |cosine|: of its '
            'absolute value\n'
            "first block, earlier stages: their depth weights in the stage's last block\n"
            'TV, KL, rank corr.: against softmax attention, from the second block on (with two blocks, a rank '
            'correlation can only be -1 or 1)\n'
            "cut: relative change of the backbone's last output without the memory of earlier stages")


def _pm(value):
    if value is None or value['mean'] is None:
        return '-'
    return f'{value["mean"]:.3f} ± {value["std"]:.3f}'


def _mean(layers, name, format='.3f'):
    values = [value for layer in layers if layer[name] for value in np.ravel(layer[name]['mean']) if value is not None]
    return f'{np.mean(values):{format}}' if values else '-'


if __name__ == '__main__':
    main()
