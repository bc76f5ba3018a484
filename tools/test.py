"""Evaluates a model of any task, and writes or draws what it predicts.

    python tools/test.py configs/faster_rcnn_r50_kcla_coco.py work_dirs/faster_rcnn_r50_kcla_coco/epoch_12.pth
"""
import json
import os
import sys
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kcla_mm.cli import build_runner, check_files, config_parser, load_config, our_errors, user_errors


def main():
    with ExitStack() as stack:
        with user_errors():
            args = parse_args()
            cfg = load_config(args)
            cfg.load_from = args.checkpoint
            check_files(cfg, 'load_from', 'test_dataloader', 'test_evaluator')
            if args.show_dir:
                draw_results(cfg, args.show_dir)
            if args.out:
                stack.enter_context(results_in(args.out, cfg))
        with our_errors():
            build_runner(cfg).test()


def parse_args():
    parser = config_parser(__doc__)
    parser.add_argument('checkpoint', help='a file or URL')
    parser.add_argument('--out', metavar='FILE',
                        help='write the results: NAME.json gives NAME.bbox.json and, of masks, '
                        "NAME.segm.json, in COCO's format; NAME.csv the scores of each image of a LesionMetric, the "
                        'worst first; NAME.pkl a list of all that the model predicts')
    parser.add_argument('--show-dir', metavar='DIR', help='draw each image there, with its annotations and the results')
    return parser.parse_args()


def draw_results(cfg, folder):
    folder = os.path.abspath(folder)  # a relative one would be put into the work dir
    if os.path.isfile(folder):
        raise NotADirectoryError(f'--show-dir {folder} is a file')
    if cfg.get('default_scope') == 'mmseg':
        cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='DrawResultsHook', out_dir=folder)]
        return
    hook = cfg.get('default_hooks', {}).get('visualization', {})
    drawing = {'DetVisualizationHook': dict(draw=True, test_out_dir=folder),
               'VisualizationHook': dict(enable=True, interval=1, out_dir=folder)}
    if hook.get('type') not in drawing:
        raise ValueError(f'--show-dir needs default_hooks.visualization of type {" or ".join(drawing)} in the config, '
                         f'got {hook.get("type")}')
    hook.update(drawing[hook.type])


@contextmanager
def results_in(out, cfg):
    """Has the evaluator write its results, which appear under their names once they are whole."""
    stem, kind = os.path.splitext(out)
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, (list, tuple)) else [cfg.test_evaluator]
    kind = kind.lower()
    needed = {'.json': 'CocoMetric', '.csv': 'LesionMetric', '.pkl': None}
    if kind not in needed:
        raise ValueError(f'--out must end in .json, .csv or .pkl, got {out}')
    metric = next((evaluator for evaluator in evaluators if evaluator['type'] == needed[kind]), None)
    if needed[kind] and metric is None:
        types = ', '.join(str(evaluator['type']) for evaluator in evaluators)
        raise ValueError(f'--out {out} needs a {needed[kind]} as test_evaluator, got {types}; '
                         f'{stem}.pkl works with any')
    os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
    with TemporaryDirectory(dir=os.path.dirname(out) or '.') as folder:
        if kind == '.json':
            metric['outfile_prefix'] = f'{folder}/results'
        elif kind == '.csv':
            metric['out_file'] = f'{folder}/results.csv'
        else:
            dump = 'DumpDetResults' if cfg.get('default_scope') == 'mmdet' else 'DumpResults'
            cfg.test_evaluator = [*evaluators, dict(type=dump, out_file_path=f'{folder}/results.pkl')]
        yield
        for name in sorted(os.listdir(folder)):  # none, but in the main process
            if name.endswith('.segm.json'):
                remove_boxes(f'{folder}/{name}')
            os.replace(f'{folder}/{name}', stem + name[len('results'):])
            print(f'Results are in {stem}{name[len("results"):]}')


def remove_boxes(path):
    """Removes the boxes from COCO results of masks: by them, pycocotools would tell small objects from large ones."""
    with open(path) as file:
        results = json.load(file)
    for result in results:
        result.pop('bbox', None)
    with open(path, 'w') as file:
        json.dump(results, file)


if __name__ == '__main__':
    main()
