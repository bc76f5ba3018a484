"""The analysis of layer attention as a user runs it, on drawn images."""
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmengine.utils import import_modules_from_strings

from kcla_mm.analysis import figures, recorded
from kcla_mm.cli import read_config
from kcla_mm.layer_attention import LAYER_ATTENTIONS

TOOLS = Path(__file__).resolve().parents[2] / 'tools'
UNET = 'kcla_mm::unet_kcla_lesions.py'


@pytest.fixture(scope='module')
def folder(run_tool, tmp_path_factory):
    """A folder with data/lesions, drawn small."""
    folder = tmp_path_factory.mktemp('lesions')
    run_tool('draw_lesions.py', 'data/lesions', '--train', 4, '--val', 4, '--size', 64, cwd=folder)
    return folder


@pytest.fixture(autouse=True)
def own_scope(monkeypatch):
    """What the tool does to its process is undone."""
    scopes = DefaultScope._instance_dict.copy()
    monkeypatch.syspath_prepend(TOOLS)
    yield
    DefaultScope._instance_dict.clear()
    DefaultScope._instance_dict.update(scopes)


@pytest.fixture
def analyze(tool, monkeypatch, capsys):
    """Runs the tool in a folder, in this process, and returns what it printed and its JSON."""

    def run(*args, cwd, draw=False):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr('sys.argv', ['analyze_attention.py', *map(str, args)])
        analyze_attention = tool('analyze_attention')
        if not draw:
            monkeypatch.setattr(analyze_attention, 'draw', lambda result, folder: [])
        analyze_attention.main()
        out_dir = cwd / args[args.index('--out-dir') + 1]
        return capsys.readouterr().out, json.loads((out_dir / 'analysis.json').read_text())

    return run


@pytest.mark.parametrize('type', LAYER_ATTENTIONS)
def test_every_type_of_an_untrained_segmenter(analyze, folder, monkeypatch, type):
    options = ['--cfg-options', f'model.backbone.attention.type={type}']
    monkeypatch.setitem(figures.STYLE, 'savefig.dpi', 30)
    monkeypatch.setattr(figures, 'MAX_PANELS', 1)
    printed, result = analyze(UNET, 'none', '--part', 'val', '--num', 3, '--out-dir', type, *options, cwd=folder,
                              draw=True)
    assert (result['attention'], result['backbone'], result['checkpoint']) == (type, 'KCLAResNetUNet', 'none')
    assert len(set(result['images'])) == 3 and all((folder / image).exists() for image in result['images'])
    assert [layer['name'] for layer in result['layers']] == [
        f'layer{stage}.{block}.layer_attention' for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert (result['depth_weights'] is None) == (type == 'DLALight')
    assert f'{type} in KCLAResNetUNet, 3 images' in printed and 'nan' not in printed
    pictures = {path.name for path in (folder / type).glob('*.png')}
    assert pictures >= {'key_alignment.png', 'memory.png'}
    assert all(name in printed for name in pictures)


def save(path, config, cwd, monkeypatch):
    """Writes a checkpoint with the weights that the model of a config is built with."""
    monkeypatch.chdir(cwd)
    cfg = read_config(config)
    import_modules_from_strings(**cfg.custom_imports)
    model = MODELS.build(dict(cfg.model, _scope_=cfg.default_scope))
    torch.save(dict(state_dict=model.state_dict(), meta={}), path)
    return model


def test_files_are_analysed_as_the_data_set_is_and_with_the_weights_of_the_checkpoint(analyze, folder, monkeypatch):
    model = save(folder / 'unet.pth', UNET, folder, monkeypatch)
    names = (folder / 'data/lesions/val.txt').read_text().split()
    validation = [folder / 'data/lesions/images' / f'{name.split(".")[0]}.jpg' for name in names]
    _, of_part = analyze(UNET, 'unet.pth', '--part', 'val', '--out-dir', 'part', cwd=folder)
    printed, of_files = analyze(UNET, 'unet.pth', '--images', *validation, '--out-dir', 'files',
                                cwd=folder)
    assert len(of_part['images']) == 4 and 'on 4 images' in printed, 'no more than there are'
    assert of_files['images'] == [str(image) for image in validation]
    for name in ('layers', 'stages', 'depth_weights'):
        assert of_part[name] == of_files[name]

    image = cv2.resize(cv2.imread(str(validation[0])), (96, 96))
    inputs = model.data_preprocessor(dict(inputs=[torch.from_numpy(image).permute(2, 0, 1)]))['inputs']
    model.eval()
    with recorded(model.backbone) as records, torch.no_grad():
        model.backbone(inputs)
    _, result = analyze(UNET, 'unet.pth', '--images', validation[0], '--out-dir', 'one', cwd=folder)
    for record, heads in zip(records, result['depth_weights']['heads']):
        np.testing.assert_allclose(record.weights[0], heads, rtol=1e-3, atol=1e-6)


def test_a_seed_draws_the_same_untrained_network_whose_features_do_not_explode(analyze, folder):
    results = [analyze(UNET, 'none', '--part', 'train', '--num', 2, '--out-dir', name, '--cfg-options',
                       'train_dataloader.dataset.pipeline.3.prob=0', cwd=folder)[1] for name in ('a', 'b')]
    assert results[0] == results[1]
    scores = [layer['score']['mean'] for layer in results[0]['layers']]
    assert all(max(score) < 9 for score in scores), 'far from the largest score'


def test_a_detector(analyze, folder, shapes):
    config = 'kcla_mm::faster_rcnn_r18_kcla_shapes.py'
    _, result = analyze(config, 'none', '--part', 'val', '--num', 2, '--out-dir', 'val', cwd=shapes)
    assert result['backbone'] == 'KCLAResNet' and len(result['layers']) == 8
    _, again = analyze(config, 'none', '--images', *result['images'], '--out-dir', 'files', cwd=shapes)
    assert again['stages'] == result['stages']


def test_a_classifier_whose_data_set_holds_its_images(analyze, folder):
    pytest.importorskip('mmpretrain')
    _, result = analyze('kcla_mm::resnet20_kcla_cifar100.py', 'none', '--images', 'data/lesions/images', '--num', 2,
                        '--out-dir', 'classifier', cwd=folder)
    assert result['backbone'] == 'KCLAResNet_CIFAR' and [stage['blocks'] for stage in result['stages']] == [2, 2, 2]
    assert len(result['stages'][1]['cut']['mean']) == 1, 'the one output of the backbone'


def test_figures_of_an_earlier_analysis_do_not_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(figures.STYLE, 'savefig.dpi', 30)
    for name in ('softmax.png', 'key_alignment_stage7.png', 'mine.png'):
        (tmp_path / name).write_bytes(b'')
    layer = dict(stage=1, total_variation=None, gate=None, temperature=None, branch=dict(mean=0.1, std=0.))
    stage = dict(stage=1, blocks=1, key_alignment=None, cut=None)
    figures.draw(dict(layers=[layer], stages=[stage], depth_weights=None), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'memory.png', 'mine.png'}


def test_as_a_command(run_tool, folder):
    printed = run_tool('analyze_attention.py', UNET, 'none', '--part', 'test', '--num', 1, '--out-dir', 'command',
                       cwd=folder)
    rows = [line.split() for line in printed.splitlines() if re.match(r' +[1-4]  ', line)]
    assert [row[0] for row in rows] == ['1', '2', '3', '4']
    assert {path.name for path in (folder / 'command').iterdir()} == {
        'analysis.json', 'key_alignment.png', 'depth_weights.png', 'depth_weights_heads.png', 'softmax.png',
        'heads.png', 'memory.png', *(f'key_alignment_stage{stage}.png' for stage in (1, 2, 3, 4))}
    height, width, _ = cv2.imread(str(folder / 'command/key_alignment.png')).shape
    assert width == 2160 and height > 500, 'of a page, at 300 dots an inch'


PART = ['--part', 'val', '--out-dir', 'out']


@pytest.mark.parametrize('args, message', [
    ([UNET, 'no.pth', *PART], 'error: no.pth does not exist'),
    ([UNET, 'none', *PART, '--num', '0'], 'error: --num must be a positive integer, got 0'),
    ([UNET, 'none', '--part', 'val', '--out-dir', 'file'], 'error: --out-dir file is a file'),
    ([UNET, 'none', '--images', 'empty', '--out-dir', 'out'], 'error: the folder empty has no images'),
    ([UNET, 'none', '--images', 'no.jpg', '--out-dir', 'out'], 'error: no.jpg does not exist'),
    ([UNET, 'none', '--images', 'file', '--out-dir', 'out'], 'error: file is not an image that can be read'),
    ([UNET, 'none', *PART, '--cfg-options', 'val_dataloader=None'],
     'error: the config has no val_dataloader, which --part val needs'),
    ([UNET, 'none', *PART, '--cfg-options', 'val_dataloader.dataset.data_root=nowhere'], 'error: nowhere'),
    ([UNET, 'none', *PART, '--cfg-options', 'model.backbone.attention=None'],
     'error: the model has no layer attention: its backbone is KCLAResNetUNet'),
    ([UNET, 'other.pth', *PART], 'error: the checkpoint other.pth is not of the model of the config'),
    ([UNET, 'plain.pth', *PART], 'error: the checkpoint plain.pth is not of the model of the config, or not of all of it: '
     'it lacks 82 parameters such as backbone.layer1.0.layer_attention.'),
    ([UNET, 'shapes.pth', *PART], 'error: the checkpoint shapes.pth cannot be loaded into the model of the config: '),
    ([UNET, 'file', *PART], 'error: the checkpoint file cannot be loaded into the model of the config: '),
])
def test_mistakes_are_found_before_images_are_read(mistake, folder, monkeypatch, args, message):
    (folder / 'empty').mkdir(exist_ok=True)
    (folder / 'file').write_text('not an image')
    torch.save(dict(state_dict={'unknown.weight': torch.zeros(1)}), folder / 'other.pth')
    weights = save(folder / 'unet.pth', UNET, folder, monkeypatch).state_dict()
    torch.save({name: value for name, value in weights.items() if 'layer_attention' not in name}, folder / 'plain.pth')
    torch.save({name: torch.zeros(3) for name in weights}, folder / 'shapes.pth')
    assert mistake('analyze_attention', *args, cwd=folder).startswith(message)
    assert not (folder / 'out').exists()
