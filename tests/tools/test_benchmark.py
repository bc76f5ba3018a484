import re

import pytest
import torch
from torch import nn


@pytest.fixture(scope='module')
def benchmark(tool):
    pytest.importorskip('mmpretrain')
    return tool('benchmark')


CIFAR = 'mmpretrain.KCLAResNet_CIFAR'


def test_multiply_adds_are_those_of_the_layers(benchmark):
    network = benchmark.build(CIFAR, 11, 'none')
    convolutions, norms = [], []

    def count(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            convolutions.append(output.numel() * module.weight[0].numel())
        elif isinstance(module, nn.BatchNorm2d):
            norms.append(output.numel())

    for module in network.modules():
        module.register_forward_hook(count)
    parameters, operations = benchmark.cost(network, 32)
    convolutions.clear(), norms.clear()
    network(torch.zeros(1, 3, 32, 32))
    assert sum(convolutions) < operations <= sum(convolutions) + 2 * sum(norms)
    assert parameters == sum(value.numel() for value in network.state_dict().values() if value.ndim) - \
        2 * sum(module.num_features for module in network.modules() if isinstance(module, nn.BatchNorm2d))


def test_kcla_adds_its_depthwise_convolutions_and_its_memorys(benchmark):
    _, plain = benchmark.cost(benchmark.build(CIFAR, 11, 'none'), 32)
    _, with_attention = benchmark.cost(benchmark.build(CIFAR, 11, 'KCLA'), 32)
    maps = [64 * 32**2, 128 * 16**2, 256 * 8**2]  # of the one block in each stage
    convolutions = 9 * sum(maps) + maps[1] * 64 // 8 + maps[2] * 128 // 16
    assert convolutions < with_attention - plain <= convolutions + 2 * (sum(maps) + maps[1] + maps[2])


def test_the_table_compares_with_the_plain_network(benchmark):
    rows = [(50, 'none', 23_500_000, 4_100_000_000), (50, 'KCLA', 23_900_000, 4_150_000_000),
            (101, 'none', 42_500_000, 7_800_000_000), (101, 'DLALight', 45_000_000, 7_900_000_000)]
    assert benchmark.table(rows).splitlines()[2:] == [
        '| 50 | none | 23.50 | 4.100 |', '| 50 | KCLA | 23.90 (+0.40) | 4.150 (+0.050) |',
        '| 101 | none | 42.50 | 7.800 |', '| 101 | DLALight | 45.00 (+2.50) | 7.900 (+0.100) |']


def test_command(run_tool, tmp_path):
    pytest.importorskip('mmpretrain')
    printed = run_tool('benchmark.py', '--backbone', CIFAR, '--depths', 11, 20, '--size', 32, cwd=tmp_path)
    rows = re.findall(r'^\| (\d+) \| (\w+) \|', printed, re.M)
    assert [attention for depth, attention in rows if depth == '20'] == \
        ['none', 'KCLA', 'LayerAttention', 'LinearLayerAttention', 'MRLABase', 'MRLALight', 'DLALight']
    assert {depth for depth, _ in rows} == {'11', '20'}


def test_a_depth_that_does_not_exist(mistake, tmp_path):
    pytest.importorskip('mmpretrain')
    assert 'depth of KCLAResNet_CIFAR must be 9n + 2' in \
        mistake('benchmark', '--backbone', CIFAR, '--depths', '21', cwd=tmp_path)
