import copy

import pytest
import torch
from torch import nn

from kcla_mm.analysis import find_backbone, memory_cut, recorded
from kcla_mm.layer_attention import LAYER_ATTENTIONS
from tests.analysis.networks import IMAGES, build
from tests.backbones.networks import attentions


def hooks(network):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())


@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_records_what_each_layer_adds_and_leaves_no_trace(type):
    network = build(type)
    before = hooks(network)
    plain = network(IMAGES)
    with recorded(network) as records:
        added = []
        handles = [layer.register_forward_hook(lambda _, inputs, outputs: added.append((inputs[0], outputs[0])))
                   for layer in attentions(network).values()]
        network(IMAGES[:1])
        added.clear()
        features = network(IMAGES)
        for handle in handles:
            handle.remove()
    assert all(torch.equal(a, b) for a, b in zip(plain, features))
    assert hooks(network) == before
    assert [record.name for record in records] == list(attentions(network)), 'of the latest pass alone'
    assert [record.stage for record in records] == [1, 1, 2, 2, 3, 3, 4, 4]
    for record, (x, y) in zip(records, added):
        for n in range(2):
            torch.testing.assert_close(record.branch[n], (y[n] - x[n]).norm() / x[n].norm())
        assert record.key.shape == record.query.shape == (2, record.layer.heads, 16)


def test_no_hook_stays_after_an_error():
    network = build()
    before = hooks(network)
    with pytest.raises(RuntimeError), recorded(network):
        network(torch.rand(2, 4, 8, 8))
    with pytest.raises(RuntimeError), memory_cut(network.layer2[0].layer_attention):
        network(torch.rand(2, 4, 8, 8))
    assert hooks(network) == before


def test_training_goes_on_as_without_a_record():
    networks = [build(drop_path=0.)]
    networks.append(copy.deepcopy(networks[0]))
    for network in networks:
        network.train()
    networks[0](IMAGES)[-1].sum().backward()
    with recorded(networks[1]) as records:
        networks[1](IMAGES)[-1].sum().backward()
    assert not any(record.key.requires_grad or record.weights.requires_grad for record in records)
    for (name, a), b in zip(networks[0].state_dict().items(), networks[1].state_dict().values()):
        assert torch.equal(a, b), name
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(networks[0].parameters(), networks[1].parameters()))


def test_records_are_precise_in_mixed_precision():
    network = build(drop_path=0.)
    with torch.autocast('cpu', torch.bfloat16), recorded(network) as records:
        network(IMAGES)
    for record in records:
        assert record.key.dtype == record.gate.dtype == record.branch.dtype == torch.float32
        torch.testing.assert_close(record.weights.sum(2), torch.ones_like(record.weights[..., 0]))


def test_kclas_gates_and_those_that_have_none():
    network = build()
    with recorded(network) as records:
        network(IMAGES)
    for record in records:
        query, key = record.query, record.key
        alignment = (query * key).sum(2) / key.norm(dim=2)
        torch.testing.assert_close(record.gate, torch.sigmoid(alignment @ record.layer.gate.T))
    network = build(gate=False)
    with recorded(network) as records:
        network(IMAGES)
    assert all(record.gate is None and record.query is None and record.key is not None for record in records)


def test_a_cut_memory_is_that_of_a_network_that_carries_none_from_stage_to_stage():
    network = build()
    alone = build(cross_stage=False)
    alone.load_state_dict(network.state_dict(), strict=False)
    expected = alone(IMAGES)
    firsts = [getattr(network, name)[0].layer_attention for name in network.res_layers]
    whole = network(IMAGES)
    with memory_cut(firsts[1]), memory_cut(firsts[2]), memory_cut(firsts[3]):
        features = network(IMAGES)
    for a, b in zip(features, expected):
        torch.testing.assert_close(a, b)
    with memory_cut(firsts[2]):
        features = network(IMAGES)
    assert [torch.equal(a, b) for a, b in zip(features, whole)] == [True, True, False, False]


def test_finds_the_backbone_in_a_model_and_its_wrapper(tmp_path):
    backbone = build()
    assert find_backbone(backbone) is backbone
    model = nn.ModuleDict(dict(neck=nn.Identity(), backbone=backbone))
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        assert find_backbone(nn.parallel.DistributedDataParallel(model)) is backbone
        wrapped = nn.parallel.DistributedDataParallel(backbone)
        with recorded(find_backbone(wrapped)) as records:
            wrapped(IMAGES)
        assert len(records) == 8
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_without_layer_attention():
    backbone = type(build())(depth=18, attention=None)
    model = nn.Module()
    model.backbone = backbone
    with pytest.raises(ValueError, match='the model has no layer attention: its backbone is KCLAResNet, and should be '
                       'one such as KCLAResNet, with an attention that is not None'):
        find_backbone(model)
    with pytest.raises(ValueError, match='backbone is NoneType'):
        find_backbone(nn.Identity())
