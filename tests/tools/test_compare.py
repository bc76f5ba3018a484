"""Comparisons of variants: on drawn lesions, on records as MMEngine writes them, and their statistics."""
import csv
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from mmengine.config import Config

CONFIG = """
_base_ = 'kcla_mm::unet_kcla_lesions.py'
model = dict(decode_head=dict(threshold=0.3))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_epochs=2, val_interval=1)
default_hooks = dict(checkpoint=dict(interval=1, save_best='DSC', rule='greater'))
"""
ARGS = ['tiny_unet.py', '--variant', 'no attention', 'model.backbone.attention=None', '--seeds', '3']
BROKEN = ['--variant', 'broken', 'optim_wrapper.optimizer.lr=-1']


@pytest.fixture(scope='module')
def compared(run_tool, tool, tmp_path_factory):
    """A folder in which three variants were compared: the first was interrupted once, the last cannot be trained."""
    folder = tmp_path_factory.mktemp('compared')
    run_tool('draw_lesions.py', 'data/lesions', '--train', 6, '--val', 3, '--size', 64, cwd=folder)
    (folder / 'tiny_unet.py').write_text(CONFIG)
    run = folder / 'work_dirs/compare/tiny_unet/seed3'
    command = [sys.executable, tool('compare').__file__, *ARGS, *BROKEN]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not (run / 'last_checkpoint').exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.communicate()[0].endswith('terminated\n') and process.returncode == 1
    size = (run / 'output.txt').stat().st_size
    printed = run_tool('compare.py', *ARGS, *BROKEN, cwd=folder, status=1)
    assert (run / 'output.txt').read_text()[size:].count('Runtime environment') == 1, 'the training was ended as well'
    return folder, printed


def rows(path):
    with open(path, newline='') as file:
        return list(csv.DictReader(file))


def scores(folder, variant):
    """The last record of a run."""
    *_, path = sorted(folder.glob(f'work_dirs/compare/{variant}/seed3/*/vis_data/scalars.json'))
    return json.loads(path.read_text().splitlines()[-1])


def test_an_interrupted_run_goes_on(compared):
    folder, printed = compared
    assert '0 of them finished earlier' in printed
    assert 'tiny_unet, seed 3: goes on from epoch_1.pth' in printed
    assert 'resumed epoch: 1, iter: 3' in (folder / 'work_dirs/compare/tiny_unet/seed3/output.txt').read_text()
    assert 'no attention, seed 3: starts' in printed


def test_variants_are_trained_as_told(compared):
    folder, _ = compared
    attention = {}
    for variant in ('tiny_unet', 'no attention'):
        cfg = Config.fromfile(folder / f'work_dirs/compare/{variant}/seed3/config.py')
        assert cfg.randomness.seed == 3
        attention[variant] = cfg.model.backbone.pop('attention')
    assert attention == {'tiny_unet': dict(type='KCLA', init_scale=1.0), 'no attention': None}


def test_tables_have_the_scores_of_the_last_validation(compared):
    folder, printed = compared
    runs = rows(folder / 'work_dirs/compare/runs.csv')
    assert [(row['variant'], row['seed'], row['epoch']) for row in runs] == [
        ('tiny_unet', '3', '2'), ('no attention', '3', '2'), ('broken', '3', '')]
    table = rows(folder / 'work_dirs/compare/summary.csv')
    for run, row in zip(runs[:2], table):
        recorded = scores(folder, run['variant'])
        assert recorded['step'] == 2
        assert {key: float(run[key]) for key in ('DSC', 'mIoU', 'Sen')} == {
            key: recorded[key] for key in ('DSC', 'mIoU', 'Sen')}
        assert float(row['mean']) == recorded['DSC'] and row['runs'] == '1' and row['sd'] == 'nan'
        assert f'{run["variant"]}, seed 3: DSC {recorded["DSC"]:.4g}' in printed
    assert float(table[1]['difference']) == pytest.approx(float(table[1]['mean']) - float(table[0]['mean']))
    assert cv2.imread(str(folder / 'work_dirs/compare/plot.png')).std() > 5
    assert not list(folder.glob('work_dirs/**/*.part'))


def test_a_run_that_fails_ends_nothing_else(compared):
    folder, printed = compared
    errors = printed[printed.index('error: these runs failed'):]
    assert 'broken, seed 3: ' in errors and 'Invalid learning rate: -1' in errors and 'broken/seed3/output.txt' in errors
    assert 'tiny_unet' not in errors
    assert rows(folder / 'work_dirs/compare/summary.csv')[2]['runs'] == '0'


@pytest.fixture
def again(compared, tool, monkeypatch, capsys):
    """Compares again, in this process, where nothing can be trained. Returns what that printed."""
    module = tool('compare')
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(compared[0])
    monkeypatch.setattr(module.subprocess, 'Popen', lambda *_, **__: pytest.fail('a training was started'))

    def run(*args):
        monkeypatch.setattr('sys.argv', ['compare.py', *args])
        module.main()
        return capsys.readouterr().out
    yield run
    signal.signal(signal.SIGTERM, handler)


def test_finished_runs_are_not_trained_again(compared, again):
    printed = again(*ARGS, '--metric', 'mIoU')
    assert '2 runs, 2 of them finished earlier' in printed
    for row in rows(compared[0] / 'work_dirs/compare/summary.csv'):
        assert float(row['mean']) == scores(compared[0], row['variant'])['mIoU']


def test_another_config_under_the_same_name_is_an_error(compared, mistake):
    message = mistake('compare', *ARGS, '--cfg-options', 'optim_wrapper.optimizer.lr=0.5', cwd=compared[0])
    assert message.startswith('error: tiny_unet was trained in work_dirs/compare/tiny_unet with another config:\n-')
    assert 'lr=0.001' in message and 'lr=0.5' in message and 'another --work-dir' in message
    cfg = Config.fromfile(compared[0] / 'work_dirs/compare/tiny_unet/config.py')
    assert cfg.optim_wrapper.optimizer.lr == 0.001
    assert 'randomness' not in message, 'the seed is no part of what is compared'


@pytest.mark.parametrize('args, message', [
    (['no.py'], 'CONFIG no.py: '),
    (['tiny_unet.py', 'tiny_unet.py'], "CONFIG tiny_unet.py: there is a variant 'tiny_unet' already"),
    (['tiny_unet.py', '--variant', 'tiny_unet', 'a=1'], "--variant 'tiny_unet': there is a variant 'tiny_unet'"),
    (['tiny_unet.py', '--variant', 'deep', 'depth'], "--variant 'deep': 'depth' is not KEY=VALUE"),
    (['tiny_unet.py', '--variant', 'deep'], "--variant 'deep': changes, KEY=VALUE, must follow"),
    (['tiny_unet.py', '--variant', 'a.b=1'], "--variant 'a.b=1': a name"),
    (['tiny_unet.py', '--variant', '..', 'a.b=1'], "--variant '..': a name"),
    (['tiny_unet.py', '--variant', 'x', 'train_cfg.max_epochs.a=1'], "--variant 'x': "),
    (['tiny_unet.py', '--variant', 'x', 'val_dataloader.dataset.ann_file=no.txt'],
     "--variant 'x': data/lesions/no.txt does not exist"),
    (['tiny_unet.py', '--variant', 'x', 'model.backbone.attention.gaet=False'],
     "KCLA has no argument 'gaet'"),
    (['tiny_unet.py', '--variant', 'x', 'model.backbon.attention.gate=False'], "--variant 'x': "),
    (['tiny_unet.py', '--cfg-options', 'train_cfg'], "--cfg-options: 'train_cfg' is not KEY=VALUE"),
    (['tiny_unet.py', '--cfg-options', 'val_dataloader=None'], 'CONFIG tiny_unet.py: a train_cfg with max_epochs'),
    (['tiny_unet.py', '--seeds', '0,x'], "--seeds '0,x' should be different integers"),
    (['tiny_unet.py', '--seeds', '1,01'], "--seeds '1,01' should be different integers"),
    (['tiny_unet.py', '--seeds', '3', '--metric', 'mDice'], "--metric 'mDice' is none of the scores of tiny_unet: m"),
    (['tiny_unet.py', '--work-dir', 'tiny_unet.py'], 'tiny_unet.py'),
])
def test_mistakes_are_found_before_training(compared, mistake, args, message):
    before = sorted(compared[0].rglob('*'))
    printed = mistake('compare', *args, cwd=compared[0])
    assert printed.startswith('error: ') and message in printed
    assert sorted(compared[0].rglob('*')) == before


# What follows needs no training: runs are made of records as MMEngine writes them.

@pytest.fixture
def recorded(tool, tmp_path):
    """Makes a run of the lines of each of its attempts."""
    def make(*attempts, length, by_epoch=True):
        for i, lines in enumerate(attempts):
            path = tmp_path / f'2030010{i + 1}_000000/vis_data/scalars.json'
            path.parent.mkdir(parents=True)
            path.write_text(lines)
        return tool('compare').Run('any', 0, tmp_path, by_epoch, length)
    return make


def lines(*rows):
    return ''.join(json.dumps(row) + '\n' for row in rows)


def criterion(tool, select, metric=None, **hook):
    args = SimpleNamespace(metric=metric, select=select)
    return tool('compare').criterion(args, Config(dict(default_hooks=dict(checkpoint=hook))))


LOSS = {'loss': 1.0, 'acc': 70.0, 'epoch': 1, 'iter': 10, 'step': 10}


def test_the_last_or_the_best_validation_counts(tool, recorded):
    result = tool('compare').result
    run = recorded(lines(LOSS, *({'top1': value, 'top5': 2 * value, 'data_time': 1, 'time': 1, 'step': step}
                                 for step, value in enumerate([3, 7, 5], 1))), length=3)
    assert result(run, *criterion(tool, 'last')) == {'top1': 5, 'top5': 10, 'epoch': 3}
    assert result(run, *criterion(tool, 'last', 'top5')) == {'top5': 10, 'top1': 5, 'epoch': 3}
    assert list(result(run, *criterion(tool, 'last', save_best=['top5', 'top1'])))[0] == 'top5'
    assert result(run, *criterion(tool, 'best', save_best='auto')) == {'top1': 7, 'top5': 14, 'epoch': 2}
    assert result(run, *criterion(tool, 'best', rule='less')) == {'top1': 3, 'top5': 6, 'epoch': 1}


def test_a_run_without_its_last_validation_is_not_finished(tool, recorded):
    run = recorded(lines({'mIoU': 1.0, 'step': 20}, dict(LOSS, iter=30, step=30)) + '{"mIoU": 2.0, "st', length=40,
                   by_epoch=False)
    assert tool('compare').result(run, *criterion(tool, 'last')) == {}
    assert tool('compare').progress(run) == 0.75


def test_records_of_a_resumed_run_replace_those_that_it_repeats(tool, recorded):
    run = recorded(lines({'mIoU': 1.0, 'step': 20}, {'mIoU': 9.0, 'step': 40}),
                   lines({'mIoU': 2.0, 'step': 40}, {'mIoU': 3.0, 'step': 60}), length=60, by_epoch=False)
    assert tool('compare').result(run, *criterion(tool, 'last')) == {'mIoU': 3.0, 'iteration': 60}
    assert tool('compare').result(run, *criterion(tool, 'best')) == {'mIoU': 3.0, 'iteration': 60}


@pytest.mark.parametrize('files, last, expected', [
    ([], None, None),
    (['epoch_1.pth', 'epoch_2.pth'], 'epoch_2.pth', 'epoch_2.pth'),
    (['epoch_3.pth', 'epoch_4.pth'], 'epoch_4.pth', 'epoch_3.pth'),  # the end, but not validated
    (['best_DSC_epoch_3.pth', 'epoch_4.pth'], 'epoch_4.pth', 'best_DSC_epoch_3.pth'),
    (['epoch_4.pth'], 'epoch_4.pth', None),
    (['best_DSC_epoch_1.pth', 'epoch_3.pth'], 'epoch_2.pth', 'best_DSC_epoch_1.pth'),  # 2 was removed, 3 is not whole
])
def test_training_goes_on_from_a_whole_checkpoint_before_the_end(tool, recorded, files, last, expected):
    run = recorded(length=4)
    for name in files:
        (run.folder / name).touch()
    if last:
        (run.folder / 'last_checkpoint').write_text(str(run.folder / last))
    found = tool('compare').checkpoint(run)
    assert (found and found.name) == expected


def test_an_unknown_metric_ends_training_after_the_first_validation(tool, recorded, monkeypatch, tmp_path):
    module = tool('compare')
    run = recorded(lines(LOSS), length=3)
    (tmp_path / 'train.py').write_text(f"""
import os, time
with open({str(tmp_path / 'pid')!r}, 'w') as file:
    file.write(str(os.getpid()))
with open({str(next(tmp_path.glob('*/vis_data/scalars.json')))!r}, 'a') as file:
    file.write('{{"DSC": 50.0, "step": 1}}' + chr(10))
time.sleep(600)
""")
    monkeypatch.setattr(module, '__file__', str(tmp_path / 'compare.py'))
    said = []
    with pytest.raises(ValueError, match="--metric 'mDice' is none of the scores of any: DSC"):
        module.train(run, 'mDice', lambda *what: said.append(what), poll=0.05, interval=0)
    assert said[0] == (run, f'starts, with output in {tmp_path}/output.txt')
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / 'pid').read_text()), 0)


def test_iteration_based_training_is_recorded_by_iterations(tool):
    cfg = Config(dict(train_cfg=dict(type='IterBasedTrainLoop', max_iters=80), val_dataloader=dict(a=1),
                      val_evaluator=dict(a=1), default_hooks=dict(logger=dict(type='LoggerHook', interval=7)),
                      visualizer=dict(type='Visualizer', vis_backends=[dict(type='TensorboardVisBackend')])))
    tool('compare').with_records(cfg)
    assert cfg.default_hooks.logger == dict(type='LoggerHook', interval=7, log_metric_by_epoch=False)
    assert [backend.type for backend in cfg.visualizer.vis_backends] == ['TensorboardVisBackend', 'LocalVisBackend']


NAN = float('nan')


def table(tool, **variants):
    return {row['variant']: row for row in tool('compare').summary({k: np.array(v) for k, v in variants.items()})}


def test_the_paired_test_of_three_seeds(tool):
    first, other = [70.0, 71.0, 75.0], [72.0, 72.5, 76.0]
    row = table(tool, first=first, other=other)['other']
    differences = [2.0, 1.5, 1.0]
    t = 1.5 / (0.5 / 3**0.5)  # their mean and standard deviation are 1.5 and 0.5
    assert row['difference'] == pytest.approx(sum(differences) / 3)
    assert row['p'] == pytest.approx(1 - t / (t**2 + 2)**0.5)  # Student's distribution with two degrees of freedom
    assert row['mean'] == pytest.approx(73.5)
    assert row['sd'] == pytest.approx(((1.5**2 + 1 + 2.5**2) / 2)**0.5)


def test_pairs_that_lack_a_score_are_left_out(tool):
    rows = table(tool, first=[70.0, NAN, 75.0, 71.0], other=[71.0, 90.0, 78.0, NAN], none=[NAN] * 4)
    t = 2 / (2**0.5 / 2**0.5)  # of the differences 1 and 3
    assert rows['other']['p'] == pytest.approx(1 - 2 / np.pi * np.arctan(t))  # one degree of freedom: Cauchy's
    assert rows['other']['difference'] == 2 and rows['other']['runs'] == 3
    assert rows['none']['runs'] == 0 and np.isnan(list(rows['none'].values())[2:]).all()


def test_no_test_without_pairs_or_differences(tool, recwarn):
    rows = table(tool, first=[70.0, 71.0], same=[70.0, 71.0], shifted=[70.3, 71.3], single=[NAN, 72.0])
    assert rows['same']['difference'] == 0 and np.isnan(rows['same']['p'])
    assert rows['shifted']['difference'] == pytest.approx(0.3) and np.isnan(rows['shifted']['p'])
    assert rows['single']['difference'] == 1 and np.isnan([rows['single']['sd'], rows['single']['p']]).all()
    assert np.isnan([rows['first']['difference'], rows['first']['p']]).all()
    assert not recwarn.list
