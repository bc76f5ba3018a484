"""Trains variants of a model, each with several seeds, and compares their scores on the validation images.

    python tools/compare.py configs/unet_resnet_kvasir_128.py configs/unet_kcla_kvasir_128.py --seeds 0,1,2
    python tools/compare.py configs/unet_kcla_kvasir_128.py --variant 'no gate' model.backbone.attention.gate=False \\
        --variant plain model.backbone.attention=None

The first config is what the others are compared with, each by a paired t test over the seeds; p knows nothing of how
many variants were tried. Each run is one of tools/train.py. The same command, given again, goes on where it was
interrupted and trains nothing twice; --seeds may have more seeds then. The results so far are in the work dir:
summary.csv, runs.csv with all scores of each run, and plot.png.
"""
import argparse
import csv
import difflib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import numpy as np
from kcla_mm.cli import build_model, check_files, read_config, user_errors
from matplotlib.figure import Figure
from mmengine.config import Config, DictAction
from scipy import stats


class Run(NamedTuple):
    variant: str
    seed: int
    folder: Path  # its work dir; the variant's config.py is in the folder above
    by_epoch: bool
    length: int  # of training, in epochs or else iterations


def main():
    with user_errors():
        args = parse_args()
        configs = read_configs(args)
        runs = plan(args, configs)
        metric, choose = criterion(args, next(iter(configs.values())))
        for run in runs:
            check_metric(metric, run)
        for name, cfg in configs.items():
            keep_config(Path(args.work_dir, name), name, cfg)
        report(args.work_dir, runs, metric, choose)
        try:
            failed = train_all(args.work_dir, runs, metric, choose)
        except KeyboardInterrupt:
            sys.exit('interrupted; the same command goes on')
    print(f'The results are in {args.work_dir}: summary.csv, runs.csv, plot.png')
    if failed:
        sys.exit('error: these runs failed, and the same command tries them again:\n' + '\n'.join(failed))


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='+', metavar='CONFIG',
                        help='a file or a zoo name, as for tools/train.py; the variant has the name of the file')
    parser.add_argument('--variant', nargs='+', action='append', default=[], metavar=('NAME', 'KEY=VALUE'),
                        help='one more variant: the first config with these changes; may be repeated')
    parser.add_argument('--cfg-options', nargs='+', default=[], metavar='KEY=VALUE',
                        help='changes to all variants, such as train_cfg.max_epochs=20')
    parser.add_argument('--seeds', default='0,1,2', help='separated by commas (default: 0,1,2)')
    parser.add_argument('--metric', help='such as DSC, coco/bbox_mAP or accuracy/top1 (default: the save_best of the '
                        "first config's CheckpointHook, or else the first score in the records)")
    parser.add_argument('--select', choices=['last', 'best'], default='last',
                        help="the validation that counts: the last, or each run's best. The best is chosen by the very "
                        'scores that are reported: that flatters, and flatters most what fluctuates (default: last)')
    parser.add_argument('--work-dir', default='work_dirs/compare', help='default: work_dirs/compare')
    return parser.parse_args()


def read_configs(args):
    """The configs that the arguments ask for, by the names of the variants."""
    common = parse_options('--cfg-options', args.cfg_options)
    asked = [(f'CONFIG {config}', None, config, {}) for config in args.configs]
    for name, *options in args.variant:
        where = f'--variant {name!r}'
        if '=' in name or '/' in name or not name.strip('. '):
            raise ValueError(f'{where}: a name, which is also that of a folder, must come before KEY=VALUE')
        if not options:
            raise ValueError(f'{where}: changes, KEY=VALUE, must follow the name')
        asked.append((where, name, args.configs[0], parse_options(where, options)))
    configs = {}
    for where, name, config, options in asked:
        try:
            cfg = read_config(config, {**common, **options})
            with_records(cfg)
            check_files(cfg, 'load_from', 'model', 'train_dataloader', 'val_dataloader', 'val_evaluator')
            build_model(cfg)  # now, not when its turn to be trained comes
        except Exception as error:  # whatever the model or MMEngine raise
            raise ValueError(f'{where}: {error}') from None
        name = name or Path(cfg.filename).stem
        if name in configs:
            raise ValueError(f'{where}: there is a variant {name!r} already; each needs a name of its own')
        configs[name] = cfg
    return configs


def parse_options(where, options):
    wrong = [option for option in options if not re.match('[^=]+=', option)]
    if wrong:
        raise ValueError(f'{where}: {wrong[0]!r} is not KEY=VALUE (configs come before all options)')
    parser = argparse.ArgumentParser()
    parser.add_argument('options', nargs='*', action=DictAction)
    return parser.parse_args(options).options or {}


def with_records(cfg):
    """Has a config record its scores, by the unit in which its training is counted."""
    by_epoch, length = unit_and_length(cfg)
    if not length or not cfg.get('val_dataloader') or not cfg.get('val_evaluator'):
        raise ValueError('a train_cfg with max_epochs or max_iters, a val_dataloader and a val_evaluator are needed')
    cfg.merge_from_dict({'default_hooks.logger': dict(type='LoggerHook', log_metric_by_epoch=by_epoch)})
    visualizer = cfg.get('visualizer') or {}
    backends = visualizer.get('vis_backends') or []
    if visualizer and not any('LocalVisBackend' in str(backend['type']) for backend in backends):
        visualizer['vis_backends'] = [*backends, dict(type='LocalVisBackend')]


def unit_and_length(cfg):
    loop = cfg.get('train_cfg') or {}
    return 'max_epochs' in loop, loop.get('max_epochs') or loop.get('max_iters')


def plan(args, configs):
    """All runs, the first seed of each variant first: they can be compared early."""
    seeds = args.seeds.split(',')
    if not all(seed.isdecimal() and int(seed) < 2**32 for seed in seeds) or len({*map(int, seeds)}) < len(seeds):
        raise ValueError(f'--seeds {args.seeds!r} should be different integers, such as 0,1,2')
    return [Run(name, int(seed), Path(args.work_dir, name, f'seed{int(seed)}'), *unit_and_length(cfg))
            for seed in seeds for name, cfg in configs.items()]


def criterion(args, cfg):
    """The metric, or None if the records decide, and what chooses an epoch or iteration from a dict of its values."""
    hook = cfg.get('default_hooks', {}).get('checkpoint') or {}
    metric = args.metric or hook.get('save_best')
    metric = metric[0] if isinstance(metric, (list, tuple)) else metric
    best = min if hook.get('rule') == 'less' else max
    choose = max if args.select == 'last' else lambda values: best(values, key=values.get)
    return None if metric == 'auto' else metric, choose


def check_metric(metric, run):
    names = list(dict.fromkeys(name for scores in validations(run).values() for name in scores))
    if metric and names and metric not in names:
        raise ValueError(f'--metric {metric!r} is none of the scores of {run.variant}: {", ".join(names)}')


def keep_config(folder, name, cfg):
    """Writes the config of a variant into its folder; that there are runs of another one is an error."""
    path = folder / 'config.py'
    if path.exists() and any(folder.glob('*/*/vis_data/scalars.json')):
        old = Config.fromfile(path)
        if old.to_dict() == cfg.to_dict():
            return
        lines = difflib.unified_diff(old.pretty_text.splitlines(), cfg.pretty_text.splitlines(), n=0, lineterm='')
        changes = [line for line in list(lines)[2:] if not line.startswith('@@')]
        raise ValueError('\n'.join([f'{name} was trained in {folder} with another config:', *changes,
                                    'Give another --work-dir or name, or remove that folder.']))
    folder.mkdir(parents=True, exist_ok=True)
    with whole(path) as part:
        part.write_text(cfg.pretty_text)


@contextmanager
def whole(path):
    """A path to write to, of a file that appears as ``path`` once it is whole."""
    part = path.with_name(f'{path.name}.part')
    yield part
    os.replace(part, path)


def records(run):
    """The rows that MMEngine's visualizer wrote in all attempts at a run, the oldest first."""
    for path in sorted(run.folder.glob('*/vis_data/scalars.json')):
        for line in path.read_text().split('\n')[:-1]:  # what follows the last newline is not whole
            yield json.loads(line)


def validations(run):
    """The scores of each validation, by epoch or iteration."""
    found = {}
    for row in records(run):
        if 'iter' not in row:  # a row of training has it
            scores = {key: value for key, value in row.items() if key not in ('step', 'time', 'data_time')}
            found.setdefault(row['step'], {}).update(scores)
    return found


def result(run, metric, choose):
    """The scores of the validation that counts, the metric first, or {} as long as the last is not recorded."""
    found = validations(run)
    metric = metric or next(iter(found.get(run.length, ())), None)
    values = {step: scores[metric] for step, scores in found.items() if metric in scores}
    if run.length not in values:
        return {}
    step = choose(values)
    return {metric: values[step], **found[step], 'epoch' if run.by_epoch else 'iteration': step}


def progress(run):
    """How far a run is, from 0 to 1."""
    done = [row['step'] if 'iter' not in row else row.get('epoch', 1) - 1 if run.by_epoch else row['iter']
            for row in records(run)]
    return max(done, default=0) / run.length


def train_all(folder, runs, metric, choose):
    """Trains all runs that are not finished. Returns a line on each that failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))  # so that the training is ended too
    todo = [run for run in runs if not result(run, metric, choose)]
    print(f'{len(runs)} runs, {len(runs) - len(todo)} of them finished earlier', flush=True)
    work = {run: 1 - progress(run) for run in todo}
    start, failed = time.time(), []

    def say(run, what):
        i = todo.index(run)
        ahead = min(1 - progress(run), work[run]) + sum(work[later] for later in todo[i + 1:])
        elapsed, done = time.time() - start, sum(work.values()) - ahead
        left = timedelta(seconds=round(elapsed / done * ahead)) if done > 0 else '?'
        print(f'[{i + 1}/{len(todo)}, {timedelta(seconds=round(elapsed))} elapsed, {left} left] '
              f'{run.variant}, seed {run.seed}: {what}', flush=True)

    for run in todo:
        status = train(run, metric, say)
        scores = result(run, metric, choose)
        if scores:
            say(run, '{} {:.4g}'.format(*next(iter(scores.items()))))
        else:
            output = run.folder / 'output.txt'
            lines = output.read_text(errors='replace').strip().splitlines() if status else ()
            failed.append(f'{run.variant}, seed {run.seed}: {lines[-1] if lines else "no score at its end"} ({output})')
            say(run, f'failed, see {output}')
        report(folder, runs, metric, choose)
    return failed


def train(run, metric, say, poll=2, interval=60):
    """Trains a run in a process of its own, from its last checkpoint on. Returns the exit status.

    Every ``poll`` seconds its records are looked at, and every ``interval`` seconds ``say(run, what)`` is called.
    """
    run.folder.mkdir(exist_ok=True)
    last = checkpoint(run)
    say(run, f'goes on from {last.name}' if last else f'starts, with output in {run.folder}/output.txt')
    command = [sys.executable, Path(__file__).resolve().with_name('train.py'), run.folder.parent / 'config.py',
               '--work-dir', run.folder, '--cfg-options', f'randomness.seed={run.seed}']
    with open(run.folder / 'output.txt', 'a') as output:
        process = subprocess.Popen(command + ['--resume', last] * bool(last), stdout=output, stderr=output)
    try:
        said = time.time()
        while True:
            try:
                return process.wait(poll)
            except subprocess.TimeoutExpired:
                check_metric(metric, run)
            if time.time() - said > interval:
                said = time.time()
                say(run, f'{progress(run):.0%}')
    finally:
        process.kill()
        process.wait()


def checkpoint(run):
    """The checkpoint to go on from, or None.

    The last, unless the interruption came between the removal of it and the next one, or between that of the end of
    training and its validation, which MMEngine would not make up for: then the newest one before.
    """
    note = run.folder / 'last_checkpoint'
    if not note.exists():
        return None
    last = Path(note.read_text().strip())
    steps = {path: int(re.search(r'(\d+)\.pth$', path.name)[1]) for path in [last, *run.folder.glob('*[0-9].pth')]}
    if last.exists() and steps[last] < run.length:
        return last
    return max((path for path in steps if steps[path] < steps[last]), key=steps.get, default=None)


def summary(scores):
    """The rows of the table.

    Args:
        scores (dict): The scores of each variant, (seeds, ) in the same order, NaN where there is none.
    """
    first = next(iter(scores.values()))
    for name, own in scores.items():
        row = dict(variant=name, runs=0, mean=np.nan, sd=np.nan, difference=np.nan, p=np.nan)
        values, both = own[~np.isnan(own)], ~np.isnan(own - first)
        row['runs'] = len(values)
        if len(values):
            row['mean'] = values.mean()
        if len(values) > 1:
            row['sd'] = values.std(ddof=1)
        if own is not first and both.any():
            differences = (own - first)[both]
            row['difference'] = differences.mean()
            if not np.allclose(differences, differences[0]):  # or else the test is undefined
                row['p'] = stats.ttest_rel(own[both], first[both]).pvalue
        yield row


def report(folder, runs, metric, choose):
    """Writes the results so far, prints the table and draws the plot."""
    results = {run: result(run, metric, choose) for run in runs}
    metric = next((next(iter(found)) for found in results.values() if found), metric)
    scores = {run.variant: np.array([found.get(metric, np.nan) for other, found in results.items()
                                     if other.variant == run.variant], float) for run in runs}
    rows = list(summary(scores))
    write(Path(folder, 'summary.csv'), [dict(metric=metric, **row) for row in rows])
    write(Path(folder, 'runs.csv'),
          [dict(variant=run.variant, seed=run.seed, **found) for run, found in results.items()])
    if not any(results.values()):
        return
    plot(Path(folder, 'plot.png'), scores, list(dict.fromkeys(run.seed for run in runs)), metric, rows)
    width = max(map(len, [metric, *scores]))
    columns = dict(runs='d', mean='.4g', sd='.3g', difference='+.3g', p='.2g')
    print(f'\n{metric:{width}}', *(f'{column:>10}' for column in columns))
    for row in rows:
        cells = ['-' if np.isnan(row[column]) else format(row[column], form) for column, form in columns.items()]
        print(f'{row["variant"]:{width}}', *(f'{cell:>10}' for cell in cells))
    print(flush=True)


def write(path, rows):
    with whole(path) as part, open(part, 'w', newline='') as file:
        table = csv.DictWriter(file, dict.fromkeys(key for row in rows for key in row))
        table.writeheader()
        table.writerows(rows)


def plot(path, scores, seeds, metric, rows):
    """Draws a point for each run, and the mean and standard deviation of each variant."""
    figure = Figure(figsize=(3 + 1.2 * len(scores), 4.5), layout='constrained')
    axes = figure.subplots()
    for seed, values in zip(seeds, zip(*scores.values())):
        axes.plot(list(scores), values, 'o', alpha=0.7, label=f'seed {seed}')
    axes.errorbar(np.arange(len(rows)) + 0.2, [row['mean'] for row in rows], [row['sd'] for row in rows], fmt='ks',
                  capsize=4, label='mean, sd')
    axes.set(ylabel=metric, xlim=(-0.5, len(rows) - 0.4))
    axes.tick_params(axis='x', rotation=30 if len(rows) > 3 else 0)
    axes.grid(axis='y', alpha=0.3)
    figure.legend(loc='outside right upper')
    with whole(path) as part:
        figure.savefig(part, format='png', dpi=150)


if __name__ == '__main__':
    main()
