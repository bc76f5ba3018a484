import re

import pytest
from mmengine.config import Config

from kcla_mm.cli import check_files, our_errors, read_config
from kcla_mm.layer_attention import KCLA


def test_errors_of_this_package_end_with_their_message_and_others_do_not():
    with pytest.raises(SystemExit, match='error: .*head_channels must be a positive integer, got 0'):
        with our_errors():
            KCLA(64, head_channels=0)
    with pytest.raises(TypeError, match='not all arguments'):
        with our_errors():
            KCLA('64')  # not a mistake that is looked for: the traceback says where it is
    with pytest.raises(ValueError, match='invalid literal'):
        with our_errors():
            int('x')


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where data sets, annotations and a checkpoint are found, also as current folder."""
    for name in ('coco/train', 'coco/val', 'voc/images'):
        (tmp_path / name).mkdir(parents=True)
    for name in ('coco/train.json', 'coco/val.json', 'voc/train.txt', 'weights.pth'):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


COCO = dict(type='CocoDataset', data_root='coco', ann_file='train.json', data_prefix=dict(img='train/'))
VOC = dict(type='XMLDataset', data_root='voc', ann_file='train.txt', data_prefix=dict(img='images', sub_data_root=''))


def loader(dataset):
    return dict(train_dataloader=dict(batch_size=2, dataset=dataset))


WRAPPERS = {
    'plain': lambda dataset: dataset,
    'RepeatDataset': lambda dataset: dict(type='RepeatDataset', times=3, dataset=dataset),
    'ConcatDataset': lambda dataset: dict(type='ConcatDataset', datasets=[VOC, dataset]),
    'nested': lambda dataset: dict(type='MultiImageMixDataset', dataset=dict(
        type='ClassBalancedDataset', dataset=dict(type='ConcatDataset', datasets=[dataset, VOC]))),
}


@pytest.mark.parametrize('wrap', WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize('missing', [dict(ann_file='no.json'), dict(data_prefix=dict(img='no/')), dict(data_root='no')])
def test_missing_parts_of_data_sets(folder, wrap, missing):
    check_files(Config(loader(wrap(COCO))), 'train_dataloader')
    with pytest.raises(FileNotFoundError, match=r'\bno\b.* does not exist'):
        check_files(Config(loader(wrap({**COCO, **missing}))), 'train_dataloader')


def test_all_that_should_be_there_is_listed(folder):
    cfg = Config(loader({**COCO, 'ann_file': 'annotations/no.json'}))
    cfg.load_from = 'no.pth'
    cfg.val_evaluator = [dict(type='CocoMetric', ann_file='coco/val.json')]
    with pytest.raises(FileNotFoundError) as error:
        check_files(cfg, 'load_from', 'train_dataloader', 'val_dataloader', 'val_evaluator')
    assert re.findall(r'^ +(missing|found) +(\S+) +(\S+)$', str(error.value), re.M) == [
        ('missing', 'coco/annotations/no.json', 'train_dataloader.dataset.ann_file'),
        ('found', 'coco/train/', 'train_dataloader.dataset.data_prefix.img'),
        ('found', 'coco/val.json', 'val_evaluator.0.ann_file'),
        ('missing', 'no.pth', 'load_from')]
    assert str(folder) in str(error.value)


@pytest.mark.parametrize('cfg', [
    dict(load_from=None),
    dict(load_from='weights.pth'),
    dict(load_from='https://somewhere/weights.pth'),
    dict(model=dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='torchvision://resnet50')))),
    dict(model=dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='weights.pth')))),
    loader({**COCO, 'ann_file': 'coco/train.json', 'data_root': None, 'data_prefix': {}}),
    loader({**COCO, 'ann_file': '', 'data_root': 'no', 'data_prefix': {}}),
    loader({**COCO, 'data_root': 's3://bucket/coco'}),
    loader({**COCO, 'data_root': 'no', 'backend_args': dict(backend='petrel')}),
    loader(dict(type='CIFAR10', data_root='no', data_prefix='no', test_mode=False)),
    dict(train_dataloader=None, val_evaluator=None),
])
def test_what_is_there_or_elsewhere_passes(folder, cfg):
    check_files(Config(cfg), 'load_from', 'model', 'train_dataloader', 'val_evaluator')


def test_missing_pretrained_weights(folder):
    cfg = Config(dict(model=dict(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint='no.pth')))))
    with pytest.raises(FileNotFoundError, match='(?s)no.pth does not exist.*model.backbone.init_cfg.checkpoint'):
        check_files(cfg, 'model')


@pytest.mark.parametrize('imports, expected', [
    ('', ['kcla_mm']),
    ("custom_imports = dict(imports=['json'])", ['json', 'kcla_mm']),
    ("custom_imports = dict(imports='json', allow_failed_imports=False)", ['json', 'kcla_mm']),
    ("custom_imports = dict(imports=['kcla_mm', 'json'])", ['kcla_mm', 'json']),
])
def test_configs_import_the_package_wherever_they_are_read(tmp_path, imports, expected):
    (tmp_path / 'config.py').write_text(imports)
    read_config(str(tmp_path / 'config.py')).dump(tmp_path / 'dumped.py')
    assert Config.fromfile(tmp_path / 'dumped.py').custom_imports.imports == expected


def test_options_that_the_config_did_not_have_are_named(tmp_path, capsys):
    (tmp_path / 'config.py').write_text('a = dict(b=1, c=[dict(d=2)])')
    options = {'a.b': 3, 'a.c.0.d': 4, 'a.c.0.e': 5, 'x.y': 6}
    cfg = read_config(str(tmp_path / 'config.py'), options)
    assert cfg.a == dict(b=3, c=[dict(d=4, e=5)]) and cfg.x == dict(y=6)
    assert re.findall(r'--cfg-options: (\S+) is not in', capsys.readouterr().out) == ['a.c.0.e', 'x.y']
