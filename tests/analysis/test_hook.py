import json

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, DefaultScope
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from kcla_mm.analysis import recorded
from kcla_mm.analysis.statistics import by_stage
from kcla_mm.layer_attention import LAYER_ATTENTIONS
from tests.analysis.networks import IMAGES, build
from tests.backbones.networks import attentions


@pytest.fixture(autouse=True)
def own_scope():
    """The default scope of a runner ends with the test."""
    scopes = DefaultScope._instance_dict.copy()
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(scopes)


class Model(BaseModel):

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, images, mode):
        return dict(loss=sum(y.mean() for y in self.backbone(images)))


class CountHooks(Hook):
    """Whether layers are being recorded in each iteration."""
    priority = 'LOWEST'

    def __init__(self):
        self.counts = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.counts.append({len(layer._forward_hooks) for layer in attentions(runner.model).values()})


def train(backbone, tmp_path, lr=0.01, log_interval=2):
    """Trains six iterations with measurements every two. Returns the lines of the log that backends get."""
    count = CountHooks()
    runner = Runner(
        Model(backbone), str(tmp_path), DataLoader([dict(images=image) for image in IMAGES] * 6, batch_size=2),
        train_cfg=dict(by_epoch=True, max_epochs=1), optim_wrapper=dict(optimizer=dict(type='SGD', lr=lr)),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=log_interval)),
        custom_hooks=[dict(type='LayerAttentionHook', interval=2), count],
        default_scope='mmengine', experiment_name=tmp_path.name)
    runner.train()
    assert count.counts == [{0}, {1}] * 3, 'the iterations between cost nothing'
    assert all(not layer._forward_hooks for layer in attentions(backbone).values())
    lines = next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines()
    return [json.loads(line) for line in lines]


def expected_names(type):
    for stage in (1, 2, 3, 4):
        yield f'layer_attention/stage{stage}/key_alignment'
        if type != 'DLALight':
            yield f'layer_attention/stage{stage}/first_block_weight'
        if type == 'KCLA' and stage > 1:
            yield f'layer_attention/stage{stage}/earlier_stages_weight'
        if type in ('KCLA', 'MRLALight', 'DLALight'):
            yield f'layer_attention/stage{stage}/gate_mean'
            yield f'layer_attention/stage{stage}/gate_std'


@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_logs_to_the_backends_in_training(type, tmp_path):
    lines = train(build(type), tmp_path)
    assert [line['step'] for line in lines] == [2, 4, 6]
    for line in lines:
        assert {name for name in line if name.startswith('layer_attention/')} == set(expected_names(type))
    name = 'layer_attention/stage4/key_alignment'
    assert len({line[name] for line in lines}) == 3, 'measured anew'


def test_logs_what_the_layers_do(tmp_path):
    backbone = build(drop_path=0.)
    line = train(backbone, tmp_path, lr=0.)[-1]
    with recorded(backbone) as records:
        backbone(IMAGES)  # still in training mode
    third = by_stage(records)[2]
    keys = [record.key for record in third]
    expected = dict(
        key_alignment=torch.cosine_similarity(*keys, dim=2).mean(),
        first_block_weight=third[1].weights[..., 4].mean(),
        earlier_stages_weight=third[1].weights[..., :4].sum(2).mean(),
        gate_mean=torch.cat([third[0].gate, third[1].gate]).mean(),
        gate_std=torch.cat([third[0].gate, third[1].gate]).std(unbiased=False))
    for name, value in expected.items():
        assert line[f'layer_attention/stage3/{name}'] == pytest.approx(float(value), abs=1e-4), name


def test_a_log_between_measurements_has_the_latest(tmp_path):
    lines = train(build(), tmp_path, log_interval=3)
    values = [line.get('layer_attention/stage1/gate_mean') for line in lines]
    assert [line['step'] for line in lines] == [3, 6] and None not in values


@pytest.mark.parametrize('interval', [0, -1, 2.5, True, '50'])
def test_wrong_interval(interval):
    with pytest.raises(ValueError, match=f'interval must be a positive integer, got {interval!r}'):
        HOOKS.build(dict(type='LayerAttentionHook', interval=interval))


def test_a_model_without_layer_attention_does_not_train(tmp_path):
    with pytest.raises(ValueError, match='the model has no layer attention: its backbone is Linear'):
        train(torch.nn.Linear(2, 2), tmp_path)
