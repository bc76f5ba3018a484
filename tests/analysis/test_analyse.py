import json

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from mmdet.registry import MODELS
from scipy.stats import entropy, spearmanr
from torch import nn

from kcla_mm.analysis import figures, recorded
from kcla_mm.analysis.analyse import Analysis, RunningMean, calibrate
from kcla_mm.analysis.exact import compare_with_softmax
from kcla_mm.analysis.statistics import by_stage, key_alignment, mean_of_pairs
from kcla_mm.layer_attention import LAYER_ATTENTIONS, KCLA, BaseLayerAttention
from tests.analysis.networks import IMAGES, build


@pytest.fixture
def stage():
    """Records of six layers, the first four and the last two of a stage."""
    layers = nn.ModuleList([*(KCLA(64, block, head_channels=16) for block in range(4)),
                            *(KCLA(128, block, 64, head_channels=16) for block in range(2))]).eval()
    memory = None
    with recorded(layers) as records:
        for layer in layers:
            _, memory = layer(20 * torch.rand(3, layer.channels, 4, 4), memory)
    return records


def test_key_alignment_is_the_cosine_of_each_pair(stage):
    first, second = by_stage(stage)
    assert [len(first), len(second)] == [4, 2]
    alignment = key_alignment(first)
    for n, head, i, j in np.ndindex(3, 4, 4, 4):
        a, b = first[i].key[n, head].detach(), first[j].key[n, head].detach()
        assert alignment[n, head, i, j] == pytest.approx(float(a @ b / a.norm() / b.norm()), abs=1e-5)
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    torch.testing.assert_close(mean_of_pairs(alignment), sum(alignment[..., i, j] for i, j in pairs) / 6)
    torch.testing.assert_close(mean_of_pairs(alignment, distance=1),
                               sum(alignment[..., i, i + 1] for i in range(3)) / 3)
    assert mean_of_pairs(alignment[..., :1, :1]).isnan().all()


@pytest.mark.filterwarnings('ignore:An input array is constant')
def test_softmax_attention_is_compared_block_by_block(stage):
    for layers in by_stage(stage):
        compared = compare_with_softmax(layers)
        assert len(compared) == len(layers) - 1
        for t, results in enumerate(compared, 2):
            for n, head in np.ndindex(3, layers[0].layer.heads):
                query = layers[t - 1].query[n, head].double()
                exact = np.exp([float(query @ layer.key[n, head].double()) / 4 for layer in layers[:t]])
                exact = exact / exact.sum()
                weights = layers[t - 1].weights[n, head, -t:].numpy()
                weights = weights / weights.sum()
                found = {name: values[n, head] for name, values in results.items()}
                assert found == pytest.approx(dict(
                    total_variation=abs(exact - weights).sum() / 2, kl_divergence=entropy(exact, weights),
                    rank_correlation=spearmanr(exact, weights.round(6)).correlation), rel=1e-5, nan_ok=True)


def test_equal_weights_have_no_rank(stage):
    for layers in by_stage(stage):
        blocks = [record._replace(weights=1 / 3 + 1e-8 * torch.rand_like(record.weights)) for record in layers]
        for results in compare_with_softmax(blocks):
            assert np.isnan(results['rank_correlation']).all() and np.isfinite(results['total_variation']).all()


def test_running_mean_leaves_out_what_is_not_a_number():
    values = np.random.default_rng(0).normal(size=(7, 2, 3))
    values[2, 0, 1] = values[4, 1, 1] = np.nan
    values[:, 1, 2] = np.nan
    mean = RunningMean()
    mean.add(values[:3])
    mean.add(torch.from_numpy(values[3:]))
    with np.testing.suppress_warnings() as quiet:
        quiet.filter(RuntimeWarning)
        np.testing.assert_allclose(mean.mean(), np.nanmean(values, 0))
        np.testing.assert_allclose(mean.std(), np.nanstd(values, 0))
    assert mean.summary()['mean'][1][2] is None


@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_an_analysis_has_all_numbers(type):
    analysis = Analysis(build(type))
    for images in IMAGES.split(1):
        analysis.add(images)
    result = json.loads(json.dumps(analysis.result(), allow_nan=False))
    kcla, gates = type == 'KCLA', type in ('KCLA', 'MRLALight', 'DLALight')
    assert len(result['layers']) == 8
    for layer in result['layers']:
        assert layer['branch']['mean'] > 0
        assert bool(layer['gate']) == gates and bool(layer['temperature']) == bool(layer['score']) == kcla
        assert bool(layer['kl_divergence']) == (kcla and layer['block'] > 0)
    for stage in result['stages']:
        assert np.shape(stage['key_alignment']['heads']) == (2 * 2**(stage['stage'] - 1), 2, 2)
        assert -1 <= stage['key_alignment']['pairs']['mean'] <= stage['key_alignment']['absolute']['mean'] <= 1
        assert (stage['cut'] is not None) == (kcla and stage['stage'] > 1)
    if type == 'DLALight':
        assert result['depth_weights'] is None
    else:
        for index, (heads, mean) in enumerate(zip(result['depth_weights']['heads'], result['depth_weights']['mean'])):
            np.testing.assert_allclose(np.mean(heads, 0), mean, atol=1e-5)
            assert len(mean) == index + 1 and sum(mean) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize('type, names', [('KCLA', {'softmax', 'heads', 'depth_weights', 'depth_weights_heads'}),
                                         ('LayerAttention', {'depth_weights', 'depth_weights_heads'}),
                                         ('DLALight', {'heads'})])
def test_figures_of_what_there_is(type, names, tmp_path, monkeypatch):
    monkeypatch.setitem(figures.STYLE, 'savefig.dpi', 40)
    monkeypatch.setattr(figures, 'MAX_PANELS', 3)
    analysis = Analysis(build(type))
    analysis.add(IMAGES)
    paths = figures.draw(json.loads(json.dumps(analysis.result())), tmp_path)
    assert {path.stem for path in paths} == names | {
        'key_alignment', 'memory', *(f'key_alignment_stage{stage}' for stage in (1, 2, 3, 4))}
    for path in paths:
        height, width = imread(path).shape[:2]
        assert width in (140, 288) and height > 60, 'of a column or a page'
        assert imread(path)[..., :3].std() > 0.05, 'something is drawn'


class Doubled(BaseLayerAttention):
    """A layer attention of one's own, without queries and keys."""

    def __init__(self, channels, block=0, previous_channels=None, stride=1, *, norm_layer=nn.BatchNorm2d):
        super().__init__(channels, block, previous_channels, stride, head_channels=1, drop_path=0., init_scale=1.,
                         with_cp=False, norm_layer=norm_layer)

    def attend(self, x, state, shortcut):
        return 3 * x, state


def test_of_a_type_of_ones_own_there_is_what_it_adds(tmp_path):
    network = MODELS.build(dict(type='KCLAResNet', depth=18, base_channels=16, stem_channels=16, init_cfg=None,
                                attention=dict(type=Doubled)))
    network.eval()
    analysis = Analysis(network)
    analysis.add(IMAGES)
    result = analysis.result()
    assert [layer['branch'] for layer in result['layers']] == [pytest.approx(dict(mean=2, std=0), abs=1e-3)] * 8
    assert result['depth_weights'] is None and result['stages'][0]['key_alignment'] is None
    assert [path.name for path in figures.draw(result, tmp_path)] == ['memory.png']


def test_averages_and_cuts_are_those_of_the_single_images():
    network = build()
    whole, single = Analysis(network), []
    for image in IMAGES.split(1):
        whole.add(image)
        single.append(Analysis(network))
        single[-1].add(image)
    averaged, results = whole.result(), [analysis.result() for analysis in single]
    for row in range(8):
        np.testing.assert_allclose(averaged['depth_weights']['heads'][row],
                                   np.mean([r['depth_weights']['heads'][row] for r in results], 0), atol=1e-5)
        values = [r['layers'][row]['branch']['mean'] for r in results]
        assert averaged['layers'][row]['branch'] == pytest.approx(
            dict(mean=np.mean(values), std=np.std(values)), abs=1e-5)

    cut = build(cross_stage=False)
    cut.load_state_dict(network.state_dict(), strict=False)
    with torch.no_grad():
        features, changed = network(IMAGES)[1], cut(IMAGES)[1]
    change = [float((b - a).norm() / a.norm()) for a, b in zip(features, changed)]
    assert averaged['stages'][1]['cut']['mean'][1] == pytest.approx(np.mean(change), rel=1e-3)
    assert averaged['stages'][1]['cut']['mean'][0] == 0


def test_calibration_gives_an_untrained_network_the_statistics_of_its_images():
    network = build(drop_path=0.)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_parameters()
    kept = network.layer1[0].bn1
    kept.running_mean.fill_(0.5)
    moments = {}

    def look(module, inputs):
        x, = inputs
        moments[module] = x.mean((0, 2, 3)), x.var((0, 2, 3))

    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d) and m is not kept]
    handles = [norm.register_forward_pre_hook(look) for norm in norms]
    calibrate(network, [IMAGES])
    for handle in handles:
        handle.remove()
    for norm in norms:
        torch.testing.assert_close(norm.running_mean, moments[norm][0])
        torch.testing.assert_close(norm.running_var, moments[norm][1])
        assert norm.momentum == 0.1 and not norm.training
    assert (kept.running_mean == 0.5).all() and (kept.running_var == 1).all()
