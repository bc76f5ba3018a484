import json

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper


def options(shapes, part, split):
    """Points a data set of a COCO config at drawn images, small."""
    return [f'{part}_dataloader.dataset.data_root={shapes}/data/shapes/',
            f'{part}_dataloader.dataset.ann_file=annotations/instances_{split}.json',
            f'{part}_dataloader.dataset.data_prefix.img={split}/',
            f'{part}_dataloader.dataset.metainfo.classes="circle,square,triangle"',
            f'{part}_dataloader.num_workers=0', f'{part}_dataloader.persistent_workers=False']


def test_one_option_swaps_the_backbone_of_a_zoo_model(run_tool, shapes, tmp_path):
    printed = run_tool(
        'train.py', 'mmdet::retinanet/retinanet_r18_fpn_1x_coco.py', '--cfg-options',
        'model.backbone.type=KCLAResNet', 'model.backbone.init_cfg=None', 'model.bbox_head.num_classes=3',
        'train_cfg.max_epochs=1', 'train_dataloader.dataset.pipeline.2.scale="(96,96)"',
        *options(shapes, 'train', 'train'), *options(shapes, 'val', 'val'),
        f'val_evaluator.ann_file={shapes}/data/shapes/annotations/instances_val.json', cwd=tmp_path)
    assert 'Evaluating bbox' in printed
    assert 'train_dataloader.dataset.metainfo.classes is not in mmdet::' in printed
    assert 'model.backbone.type is not in' not in printed

    work_dir = tmp_path / 'work_dirs/retinanet_r18_fpn_1x_coco'
    weights = torch.load(work_dir / 'epoch_1.pth', weights_only=False)['state_dict']
    assert 'backbone.layer4.1.layer_attention.value' in weights
    cfg = Config.fromfile(work_dir / 'retinanet_r18_fpn_1x_coco.py')
    assert cfg.model.backbone.type == 'KCLAResNet'
    assert cfg.custom_imports.imports == ['kcla_mm']


def losses(folder):
    lines = [json.loads(line) for line in next(folder.glob('*/vis_data/scalars.json')).read_text().splitlines()]
    return [line['loss'] for line in lines if 'loss' in line]


def test_resumed_training_goes_on_where_it_was(run_tool, trained):
    folder, printed = trained
    assert 'Evaluating bbox' in printed
    printed = run_tool('train.py', 'tiny.py', '--resume', '--cfg-options', 'train_cfg.max_epochs=3', cwd=folder)
    assert 'resumed epoch: 2, iter: 8' in printed
    assert 'weights_only' not in printed
    assert (folder / 'work_dirs/tiny/epoch_3.pth').exists()
    before, after = [torch.load(folder / f'work_dirs/tiny/epoch_{epoch}.pth', weights_only=False) for epoch in (2, 3)]
    assert after['meta']['iter'] == before['meta']['iter'] + 4
    steps = [{int(state['step']) for state in checkpoint['optimizer']['state'].values()}
             for checkpoint in (before, after)]
    assert steps == [{8}, {12}]


def config(tool, folder, monkeypatch, *args):
    train = tool('train')
    monkeypatch.chdir(folder)
    monkeypatch.setattr('sys.argv', ['train.py', 'tiny.py', *map(str, args)])
    return train.training_config(train.parse_args())


def test_resume_without_a_checkpoint_starts_as_the_config_says(tool, trained, monkeypatch, tmp_path):
    cfg = config(tool, trained[0], monkeypatch, '--work-dir', tmp_path, '--resume', '--cfg-options', 'load_from=a.pth')
    assert not cfg.resume and cfg.load_from == 'a.pth'


def test_resume_from_a_checkpoint(tool, trained, monkeypatch):
    cfg = config(tool, trained[0], monkeypatch, '--resume', 'work_dirs/tiny/epoch_1.pth')
    assert cfg.resume and cfg.load_from == 'work_dirs/tiny/epoch_1.pth'


def test_learning_rate_follows_the_batch_size(tool, trained, monkeypatch):
    assert config(tool, trained[0], monkeypatch, '--auto-scale-lr', '--cfg-options',
                  'auto_scale_lr.base_batch_size=16').auto_scale_lr.enable


@pytest.mark.parametrize('options, decay', [
    ([], {0.0}),
    (['optim_wrapper.paramwise_cfg.custom_keys.log_temperature.decay_mult=2.'], {2e-4}),
    (['optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult=1.', 'optim_wrapper.optimizer.weight_decay=0.5'], {0.0}),
])
def test_learnable_temperatures_have_no_weight_decay(tool, trained, monkeypatch, options, decay):
    cfg = config(tool, trained[0], monkeypatch, '--cfg-options', 'model.backbone.attention.learnable_temperature=True',
                 'optim_wrapper.optimizer.weight_decay=1e-4', *options)
    model = MODELS.build(cfg.model)
    temperatures = {id(p) for name, p in model.named_parameters() if name.endswith('log_temperature')}
    groups = build_optim_wrapper(model, cfg.optim_wrapper).optimizer.param_groups
    decays = {spared: {group['weight_decay'] for group in groups for p in group['params']
                       if (id(p) in temperatures) == spared} for spared in (True, False)}
    assert temperatures and decays == {True: decay, False: {cfg.optim_wrapper.optimizer.weight_decay}}


@pytest.mark.parametrize('options', [
    [], ['model.backbone.attention.learnable_temperature=True', 'optim_wrapper.optimizer.weight_decay=0']])
def test_optimisers_without_such_temperatures_or_decay_are_left_alone(tool, trained, monkeypatch, options):
    cfg = config(tool, trained[0], monkeypatch, *(['--cfg-options', *options] if options else []))
    assert 'paramwise_cfg' not in cfg.optim_wrapper


@pytest.mark.parametrize('args, message', [
    (['no.py'], "error: [Errno 2] No such file or directory: 'no.py'"),
    (['mmdet::retinanet/no.py'], 'error: file "'),
    (['kcla_mm::no.py'], "error: kcla_mm has no config 'no.py'"),
    (['broken.py'], 'error: the config broken.py cannot be read: '),
    (['tiny.py', '--launcher', 'pytorch'], 'error: --launcher pytorch: this process was not started by it (RANK'),
    (['tiny.py', '--auto-scale-lr'], 'error: --auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...)'),
    (['tiny.py', '--amp', '--cfg-options', 'optim_wrapper.type=Apex'],
     'error: --amp needs an optim_wrapper of type OptimWrapper, got Apex'),
    (['tiny.py', '--resume', 'no.pth'], 'error: no.pth does not exist'),
    (['tiny.py', '--cfg-options', 'load_from=no.pth'], 'error: no.pth does not exist'),
    (['mmdet::retinanet/retinanet_r18_fpn_1x_coco.py'],
     'error: data/coco/annotations/instances_train2017.json does not exist'),
])
def test_mistakes_are_found_before_the_model_is_built(mistake, trained, args, message):
    folder, _ = trained
    (folder / 'broken.py').write_text('a = (1')
    assert mistake('train', *args, '--work-dir', 'mistaken', cwd=folder).startswith(message)
    assert not (folder / 'mistaken').exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason='mixed precision works with a GPU')
def test_mixed_precision_needs_a_gpu(mistake, trained):
    assert mistake('train', 'tiny.py', '--amp', cwd=trained[0]) == 'error: --amp needs a GPU, and PyTorch sees none'
