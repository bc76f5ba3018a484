import json
import re
from statistics import median

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def benchmark(tool):
    pytest.importorskip('mmpretrain')
    return tool('benchmark')


@pytest.fixture
def command(benchmark, monkeypatch, capsys):
    """Runs the command in this process. Returns what it printed as its result, and on the terminal."""
    def run(*args, status=None):
        monkeypatch.setattr('sys.argv', ['benchmark.py', '--backbones', CIFAR, '--size', '16', *map(str, args)])
        if status is None:
            benchmark.main()
        else:
            with pytest.raises(SystemExit) as end:
                benchmark.main()
            assert end.value.code == status
        return capsys.readouterr()
    return run


@pytest.fixture
def figures(benchmark, monkeypatch):
    """The figures that were drawn."""
    drawn = []

    class Figure(benchmark.Figure):
        def savefig(self, path, **options):
            super().savefig(path, **options)
            drawn.append(self)

    monkeypatch.setattr(benchmark, 'Figure', Figure)
    return drawn


CIFAR = 'mmpretrain.KCLAResNet_CIFAR'
MAPS = 64 * 32**2, 128 * 16**2, 256 * 8**2  # elements of a block's map, in each stage


def run_of(benchmark, size=32, batch=1, dtype='float32'):
    return benchmark.Run(torch.device('cpu'), dtype, False, size, batch)


def count(benchmark, measure, attention, depth=11, **options):
    network = benchmark.Network(options.pop('backbone', CIFAR), depth, attention).build()
    return getattr(benchmark, measure)(network, run_of(benchmark, **options))


def rows(table):
    """The cells of a Markdown table, a dict for each row."""
    lines = [line.strip('| ').split(' | ') for line in table.splitlines() if line.startswith('| ')]
    return [dict(zip(lines[0], line)) for line in lines[1:]]


def results(folder):
    return json.loads((folder / 'benchmark.json').read_text())['results']


def test_multiply_adds_are_those_of_the_layers(benchmark):
    network = benchmark.Network(CIFAR, 11, 'none').build()
    convolutions, norms = [], []

    def count(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            convolutions.append(output.numel() * module.weight[0].numel())
        elif isinstance(module, nn.BatchNorm2d):
            norms.append(output.numel())

    operations = benchmark.multiply_adds(network, run_of(benchmark))
    for module in network.modules():
        module.register_forward_hook(count)
    network(torch.zeros(1, 3, 32, 32))
    assert sum(convolutions) < operations <= sum(convolutions) + 2 * sum(norms)
    assert benchmark.parameters(network) == sum(
        module.weight.numel() * (2 if isinstance(module, nn.BatchNorm2d) else 1)
        for module in network.modules() if isinstance(module, (nn.Conv2d, nn.BatchNorm2d)))


def test_kcla_adds_convolutions_norms_and_products(benchmark):
    added = count(benchmark, 'multiply_adds', 'KCLA') - count(benchmark, 'multiply_adds', 'none')
    convolutions = 9 * sum(MAPS) + MAPS[1] * 64 // 8 + MAPS[2] * 128 // 16  # and of the memory, in heads
    norms = 2 * (sum(MAPS) + MAPS[1] + MAPS[2])
    products = sum(MAPS) + MAPS[1] + MAPS[2]  # with the gate; with the weight of a layer that is not the first
    expected = convolutions + norms + products
    assert expected <= added < 1.01 * expected  # what works on descriptors is small


def test_recomputation_does_not_change_multiply_adds(benchmark):
    once = count(benchmark, 'multiply_adds', 'MRLALight')
    assert count(benchmark, 'multiply_adds', 'MRLALight,with_cp=True', backbone=f'{CIFAR},with_cp=True') == once


def test_sums_over_layers_grow_with_depth(benchmark):
    """One block more in each stage costs KCLA what the one before did, and layer attention a map more."""
    depths = 20, 29, 38
    for attention, growth in ('none', 0), ('KCLA', 0), ('LayerAttention', sum(MAPS)), ('MRLABase', sum(MAPS)):
        costs = [count(benchmark, 'multiply_adds', attention, depth) for depth in depths]
        assert costs[2] - 2 * costs[1] + costs[0] == pytest.approx(growth, rel=0.03), attention


def test_state_is_carried_in_constant_memory_or_grows(benchmark):
    def carried(attention, depth):
        return count(benchmark, 'carried_bytes', attention, depth, batch=2) / (2 * 4 * MAPS[0])

    assert carried('none', 20) == 0
    assert carried('KCLA', 20) == carried('KCLA', 56) == pytest.approx(1, abs=0.01)
    for attention in 'LayerAttention', 'MRLABase':
        assert carried(attention, 20) == pytest.approx(2, rel=0.01)
        assert carried(attention, 56) == pytest.approx(6, rel=0.01)


class Layers(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.recompute = recompute
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
                                    nn.Conv2d(8, 4, 3, padding=1, bias=False))

    def forward(self, x):
        return (checkpoint(self.layers, x, use_reentrant=False) if self.recompute else self.layers(x), )


def test_activation_memory_is_what_is_kept(benchmark):
    run = run_of(benchmark, size=16, batch=2)
    output = 2 * 4 * 16**2
    convolution, norm, statistics = 2 * 8 * 16**2, 2 * 8 * 16**2, 2 * 8
    for _ in range(2):  # nothing of the first time counts the second time
        assert benchmark.activation_bytes(Layers(False), run) == 4 * (convolution + norm + statistics + output)
        assert benchmark.activation_bytes(Layers(True), run) == 4 * output


def test_recomputation_lowers_activation_memory(benchmark):
    keep, attention, blocks = [
        count(benchmark, 'activation_bytes', f'MRLALight{attention}', backbone=CIFAR + backbone)
        for backbone, attention in (('', ''), ('', ',with_cp=True'), (',with_cp=True', ''))]
    assert max(attention, blocks) < 0.9 * keep
    assert count(benchmark, 'activation_bytes', 'none') < attention


def test_half_precision_takes_less_memory(benchmark):
    full, half = [count(benchmark, 'activation_bytes', 'none', dtype=dtype) for dtype in ('float32', 'bfloat16')]
    assert 0.5 < half / full < 0.7  # weights are kept in both


def test_table_json_and_plots_agree(command, figures, tmp_path):
    printed = command('--depths', 11, 20, '--attentions', 'KCLA,with_cp=True', 'MRLABase', '--batch', 2, '--time', 3,
                      '--out', tmp_path).out
    entries = results(tmp_path)
    assert [(entry['depth'], entry['attention']) for entry in entries] == [
        (depth, attention) for depth in (11, 20) for attention in ('none', 'KCLA,with_cp=True', 'MRLABase')]
    for entry, row, plain in zip(entries, rows(printed), [entries[0]] * 3 + [entries[3]] * 3):
        def shown(title):
            number, _, compared = row[title].partition(' ')
            return float(number), compared

        number, compared = shown('parameters (M)')
        assert number == round(entry['parameters'] / 1e6, 2)
        assert compared == ('' if entry is plain else f'(+{(entry["parameters"] - plain["parameters"]) / 1e6:.2f})')
        assert shown('carried state (MiB)')[0] == round(entry['carried_bytes'] / 2**20, 2)
        for name, title in ('inference_seconds', 'inference (ms)'), ('training_seconds', 'training step (ms)'):
            rounds = entry['rounds'][name]
            assert len(rounds) == 3 and min(rounds) > 0 and entry[name] == median(rounds)
            assert shown(title)[0] == round(entry[name] * 1e3, 1)
            ratio = median([a / b for a, b in zip(rounds, plain['rounds'][name])])
            assert shown(title)[1] == ('' if entry is plain else f'(x {ratio:.2f})')
        assert entry['images_per_second'] == pytest.approx(2 / entry['inference_seconds'])

    assert {path.name for path in tmp_path.iterdir()} == {'benchmark.json', 'depths.png', 'networks.png', 'ratios.png'}
    panel, = [axes for axes in figures[-2].axes if axes.get_title() == 'carried state']
    assert {line.get_label(): list(line.get_ydata()) for line in panel.lines} == {
        attention: [entry['carried_bytes'] / 2**20 for entry in entries if entry['attention'] == attention]
        for attention in ('none', 'KCLA,with_cp=True', 'MRLABase')}


def test_bars_are_ratios_to_the_first_network(command, figures, tmp_path):
    command('--depths', 11, '--attentions', 'KCLA', '--out', tmp_path)
    plain, kcla = results(tmp_path)
    panel, = [axes for axes in figures[-1].axes if axes.get_title().startswith('activation memory')]
    assert [bar.get_width() for bar in panel.patches] == [1, kcla['activation_bytes'] / plain['activation_bytes']]
    assert (tmp_path / 'networks.png').read_bytes().startswith(b'\x89PNG')


def test_an_interrupted_sweep_keeps_what_it_has_and_goes_on(benchmark, command, monkeypatch, tmp_path):
    calls = []

    def until_interrupted(network, run):
        calls.append(network.depth)
        if len(calls) == 7:  # two networks, two rounds: in the second round of the second depth
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setitem(benchmark.TIMED, 'inference_seconds', until_interrupted)
    monkeypatch.setitem(benchmark.TIMED, 'training_seconds', lambda network, run: 1.5)
    sweep = '--depths', '11,20', 29, '--attentions', 'KCLA', '--time', 1, '--out', tmp_path
    printed = command(*sweep, status=130)
    assert 'interrupted' in printed.err
    kept = results(tmp_path)
    assert [(entry['depth'], entry['finished']) for entry in kept] == [(11, True)] * 2 + [(20, False)] * 2
    assert [row['depth'] for row in rows(printed.out)] == ['11', '11', '20', '20']
    assert all('activation_bytes' in entry for entry in kept) and 'inference_seconds' in kept[1]
    assert (tmp_path / 'depths.png').exists()

    command(*sweep)
    assert set(calls[7:]) == {20, 29}
    assert results(tmp_path)[:2] == kept[:2] and len(results(tmp_path)) == 6
    command('--depths', 11, '--attentions', 'KCLA', '--time', 1, '--out', tmp_path)
    assert len(calls) == 7 + 8 and len(results(tmp_path)) == 6


@pytest.mark.parametrize('options, failure', [([], 'out of memory'), (['--compile'], 'cannot be compiled')])
def test_the_rest_goes_on_where_memory_or_a_compiler_fails(benchmark, command, monkeypatch, tmp_path, options, failure):
    def training_seconds(network, run):
        if network.attention:
            torch.empty(2**50 if failure == 'out of memory' else -1)
        return 1.5

    monkeypatch.setattr(torch, 'compile', lambda network: network)
    monkeypatch.setitem(benchmark.TIMED, 'training_seconds', training_seconds)
    printed = command('--depths', 11, '--attentions', 'KCLA', '--time', 1, '--out', tmp_path, *options).out
    plain, kcla = rows(printed)
    assert (plain['training step (ms)'], kcla['training step (ms)']) == ('1500.0', failure)
    assert float(kcla['inference (ms)'].split()[0]) > 0
    assert results(tmp_path)[1]['training_seconds'] is None and results(tmp_path)[1]['finished']
    assert (tmp_path / 'networks.png').exists()


def test_progress_says_how_long_the_rest_takes(benchmark, monkeypatch, capsys):
    now = 1000
    monkeypatch.setattr(benchmark.time, 'time', lambda: now)
    progress = benchmark.Progress(400)
    progress('counting')
    now += 30
    progress.add(100)
    progress('round 1')
    progress('not again so soon')
    assert capsys.readouterr().err == '[  0%, ... left] counting\n[ 25%, 90 s left] round 1\n'


@pytest.mark.parametrize('backbone', ['mmpretrain.KCLASEResNet', 'mmdet.KCLARegNet,arch=regnetx_400mf',
                                      'mmdet.KCLAResNeSt', 'mmdet.KCLARes2Net', 'mmseg.KCLAResNetUNet'])
def test_every_kind_of_backbone(benchmark, backbone):
    pytest.importorskip(backbone.partition('.')[0])
    network = benchmark.Network(backbone, None, 'KCLA')
    network.check(run_of(benchmark, size=64, batch=2))
    assert network.depth == (None if 'RegNet' in backbone or 'UNet' in backbone else 50)


def test_options(benchmark):
    assert benchmark.split_options('KCLA,with_cp=True,temperatures=(0.5,2),norm_cfg.type=GN,norm_cfg.num_groups=8') == \
        ('KCLA', dict(with_cp=True, temperatures=(0.5, 2), norm_cfg=dict(type='GN', num_groups=8)))
    layer = benchmark.Network(CIFAR, 11, 'KCLA,gate=False').build().layer1[0].layer_attention
    assert layer.gate is None


@pytest.mark.parametrize('args, message', [
    (['--depths', 21], r'depth of KCLAResNet_CIFAR must be 9n \+ 2'),
    (['--backbones', 'mmpretrain.KCLAResNet', '--depths', 51], r'invalid depth 51.*there are 18, 34, 50, 101, 152'),
    (['--backbones', 'mmpretrain.ResNet'], 'mmpretrain.ResNet: must be one of .*mmpretrain.KCLAResNet'),
    (['--depths', 11, '--attentions', 'KLCA'], r"must be one of \['DLALight', 'KCLA',.* got 'KLCA'"),
    (['--depths', 11, '--attentions', 'KCLA,gates=False'], "KCLA has no argument 'gates'; it accepts .*gate"),
    (['--depths', 11, '--attentions', 'KCLA,head_channels=48'], 'head_channels=48 does not divide'),
    (['--backbones', 'mmpretrain.KCLAResNet', '--size', 32], '--size 32 --batch 1: Expected more than 1 value per'),
    (['--depths', 11, '--attentions', 'KCLA,temperatures=(1,2'], 'KCLA,temperatures=.1,2: Imbalanced brackets'),
    (['--device', 'cuda:99'], '--device cuda:99 is not there: PyTorch sees cpu'),
    (['--device', 'gpu'], '--device gpu is not there: PyTorch sees cpu'),
])
def test_mistakes_are_found_before_anything_is_measured(mistake, tmp_path, args, message):
    pytest.importorskip('mmpretrain')
    if '--backbones' not in args:
        args = ['--backbones', CIFAR, '--size', 32, *args]
    assert re.search(message, mistake('benchmark', *args, '--out', tmp_path / 'out', cwd=tmp_path))
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('args, message', [
    (['--size', 0], '--size must be at least 1, got 0'), (['--batch', -1], '--batch must be at least 1, got -1'),
    (['--dtype', 'half'], "--dtype: invalid choice: 'half'"),
    (['--time', -3], '--time must be at least 1 round, got -3')])
def test_wrong_numbers(mistake, tmp_path, capsys, args, message):
    pytest.importorskip('mmpretrain')
    assert mistake('benchmark', *args, cwd=tmp_path) == 2
    assert message in capsys.readouterr().err


def test_results_of_another_benchmark_are_not_mixed(mistake, tmp_path):
    pytest.importorskip('mmpretrain')
    (tmp_path / 'benchmark.json').write_text(json.dumps(dict(settings=dict(batch=2), results=[])))
    message = mistake('benchmark', '--backbones', CIFAR, '--depths', 11, '--out', tmp_path, cwd=tmp_path)
    assert message.startswith(f'error: --out {tmp_path} has results of another benchmark')
    assert 'batch 2, not 1' in message


def test_out_is_a_folder(mistake, tmp_path):
    pytest.importorskip('mmpretrain')
    (tmp_path / 'out').write_text('')
    assert mistake('benchmark', '--backbones', CIFAR, '--depths', 11, '--out', 'out', cwd=tmp_path) == \
        'error: --out out must be a folder, it is a file'


def test_command(run_tool, tmp_path):
    pytest.importorskip('mmpretrain')
    printed = run_tool('benchmark.py', '--backbone', CIFAR, '--depths', 11, '--size', 16, cwd=tmp_path)
    assert [row['attention'] for row in rows(printed)] == \
        ['none', 'KCLA', 'LayerAttention', 'LinearLayerAttention', 'MRLABase', 'MRLALight', 'DLALight']
    assert not list(tmp_path.iterdir())
