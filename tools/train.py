"""Trains a model of any task.

    python tools/train.py configs/faster_rcnn_r50_kcla_coco.py
    python tools/train.py configs/unet_kcla_kvasir.py
    python tools/train.py mmdet::retinanet/retinanet_r50_fpn_1x_coco.py --cfg-options model.backbone.type=KCLAResNet
    torchrun --nproc_per_node 8 tools/train.py configs/faster_rcnn_r101_kcla_coco.py --launcher pytorch
"""
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kcla_mm.cli import build_runner, check_files, config_parser, dicts, load_config, our_errors, user_errors
from mmengine.device import get_device
from mmengine.runner import find_latest_checkpoint


def main():
    with user_errors():
        cfg = training_config(parse_args())
        check_files(cfg, 'load_from', 'model', 'train_dataloader', 'val_dataloader', 'val_evaluator')
    with our_errors():
        build_runner(cfg).train()


def parse_args():
    parser = config_parser(__doc__)
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true',
                        help='scale the learning rate to the batch size that results from the number of processes')
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT',
                        help='go on from a checkpoint; without its name, from the latest in the work dir, or from the '
                        'beginning if there is none')
    return parser.parse_args()


def training_config(args):
    """The config with all that the arguments ask for."""
    cfg = load_config(args)
    if args.amp:
        wrapper = cfg.optim_wrapper.get('type', 'OptimWrapper')
        if wrapper not in ('OptimWrapper', 'AmpOptimWrapper'):
            raise ValueError(f'--amp needs an optim_wrapper of type OptimWrapper, got {wrapper}')
        if get_device() == 'cpu':
            raise ValueError('--amp needs a GPU, and PyTorch sees none')
        cfg.optim_wrapper.update(type='AmpOptimWrapper', loss_scale='dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise ValueError('--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the config: the batch '
                             'size, over all GPUs, that its learning rate is meant for')
        cfg.auto_scale_lr.enable = True
    spare_temperatures(cfg)
    if args.resume:
        checkpoint = find_latest_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
        if checkpoint:
            cfg.resume, cfg.load_from = True, checkpoint
    return cfg


def spare_temperatures(cfg):
    """Has the optimiser of a config leave KCLA's learnable temperatures without weight decay, unless it says otherwise.

    They are logarithms: decay would draw them to 1.
    """
    if any(node.get('learnable_temperature') for _, node in dicts(cfg.model)):
        wrapper = cfg.optim_wrapper
        if wrapper.get('optimizer', {}).get('weight_decay'):
            options = wrapper.get('paramwise_cfg') or {}
            keys = {'log_temperature': dict(decay_mult=0.), **options.get('custom_keys', {})}
            wrapper.paramwise_cfg = dict(options, custom_keys=keys)


if __name__ == '__main__':
    main()
