"""Compares what layer attentions cost: parameters and multiply-adds.

    python tools/benchmark.py --depths 50 101
    python tools/benchmark.py --backbone mmpretrain.KCLAResNet_CIFAR --depths 20 56 110 --size 32

The plain network comes first, and what each attention adds to it is in brackets. Multiply-adds are those of
convolutions, linear layers, matrix products and normalisations, for one image; sums and products of single elements are
not counted.
"""
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from kcla_mm.backbones import FRAMEWORKS
from kcla_mm.cli import user_errors
from kcla_mm.layer_attention import LAYER_ATTENTIONS
from mmengine.analysis import FlopAnalyzer
from mmengine.registry import MODELS


def main():
    args = parse_args()
    rows = []
    for depth in args.depths:
        for attention in ['none', *args.attentions]:
            with user_errors():
                network = build(args.backbone, depth, attention)
            rows.append((depth, attention, *cost(network, args.size)))
    print(f'{args.backbone} at {args.size} x {args.size}\n\n{table(rows)}')


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('--backbone', default=f'{FRAMEWORKS[0]}.KCLAResNet', metavar='FRAMEWORK.TYPE',
                        help='a backbone with layer attention (default: %(default)s)')
    parser.add_argument('--depths', nargs='+', type=int, default=[50], metavar='DEPTH', help='default: 50')
    parser.add_argument('--attentions', nargs='+', choices=list(LAYER_ATTENTIONS), default=list(LAYER_ATTENTIONS),
                        metavar='TYPE', help=f'default: {" ".join(LAYER_ATTENTIONS)}')
    parser.add_argument('--size', type=int, default=224, help='height and width of the image (default: 224)')
    return parser.parse_args()


def build(backbone, depth, attention):
    """A backbone in eval mode; ``attention`` 'none' makes it the plain network."""
    network = MODELS.build(dict(type=backbone, depth=depth, init_cfg=None,
                                attention=None if attention == 'none' else dict(type=attention)))
    network.eval()
    return network


def cost(network, size):
    """Numbers of parameters and of multiply-adds for an image of (3, size, size)."""
    analysis = FlopAnalyzer(network, torch.zeros(1, 3, size, size))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return sum(parameter.numel() for parameter in network.parameters()), analysis.total()


def table(rows):
    """The rows (depth, attention, parameters, multiply-adds) as a Markdown table."""
    lines = ['| depth | attention | parameters (M) | multiply-adds (G) |', '|---|---|---|---|']
    for depth, attention, parameters, operations in rows:
        if attention == 'none':
            plain = parameters, operations
            cells = f'{parameters / 1e6:.2f} | {operations / 1e9:.3f}'
        else:
            cells = (f'{parameters / 1e6:.2f} (+{(parameters - plain[0]) / 1e6:.2f}) | '
                     f'{operations / 1e9:.3f} (+{(operations - plain[1]) / 1e9:.3f})')
        lines.append(f'| {depth} | {attention} | {cells} |')
    return '\n'.join(lines)


if __name__ == '__main__':
    main()
