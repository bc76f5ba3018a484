"""Draws what a model finds in images, and writes it.

    python tools/infer.py configs/faster_rcnn_r50_kcla_coco.py epoch_12.pth street.jpg photos/ --out-dir results

Of photos/a.jpg come results/vis/a.jpg and, of a detector, results/preds/a.json: labels (the classes' indices), scores,
boxes (x1, y1, x2, y2) and, where the model predicts them, masks (run-length encoded). Of a segmenter comes
results/preds/a.png, of the image's own size: 0 and 255 if there are two classes, else the classes' indices in the
colours of the palette. Of a classifier come results/vis/a.png and results/preds/a.json: label, class, score, and the
scores of all classes.
"""
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.util import find_spec
from pathlib import Path

if find_spec('kcla_mm') is None:  # a checkout that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cv2
import numpy as np
import torch
from kcla_mm.cli import check_files, read_config, user_errors
from mmengine.config import DictAction
from mmengine.utils import track_iter_progress
from PIL import Image

EXTENSIONS = '.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp', '.ppm', '.pgm'


def main():
    with user_errors():
        args = parse_args()
        cfg = read_config(args.config, args.cfg_options)
        cfg.load_from = args.checkpoint
        check_files(cfg, 'load_from')
        scope = cfg.get('default_scope')
        if scope not in INFERENCERS:
            raise ValueError(f'the config must be of {" or ".join(INFERENCERS)}, got default_scope={scope!r}')
        if args.device and args.device.startswith('cuda') and not torch.cuda.is_available():
            raise ValueError(f'--device {args.device}: PyTorch sees no GPU')
        if Path(args.out_dir).is_file():
            raise NotADirectoryError(f'--out-dir {args.out_dir} is a file')
        images = find_images(args.images)
        check_images(images, args.out_dir)
    infer = INFERENCERS[scope](cfg, args)
    for image in track_iter_progress(images):
        infer(image)
    print(f'Drawn results are in {args.out_dir}/vis, the results themselves in {args.out_dir}/preds')


def parse_args():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument('config', help='a file, or a zoo name such as kcla_mm::faster_rcnn_r101_kcla_coco.py')
    parser.add_argument('checkpoint', help='a file or URL')
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='image files, or folders of them')
    parser.add_argument('--out-dir', required=True, metavar='DIR', help='where the results go')
    parser.add_argument('--device', help='such as cuda:0 or cpu (default: a GPU if there is one)')
    parser.add_argument('--score-thr', type=float, default=0.3,
                        help='of a detector, draw what scores at least this (default: 0.3); the JSON files have all')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, metavar='KEY=VALUE',
                        help='changes to the config')
    return parser.parse_args()


def find_images(names):
    """The files that are named, and those in the folders that are named."""
    images = []
    for path in map(Path, names):
        if path.is_dir():
            found = sorted(child for child in path.iterdir() if child.suffix.lower() in EXTENSIONS)
            if not found:
                raise ValueError(f'the folder {path} has no images ({", ".join(EXTENSIONS)})')
            images += found
        else:
            images.append(path)
    return images


def check_images(images, out_dir):
    """Makes sure that all can be read, and that no result would replace an image or another's result."""
    results = {}
    for path in images:
        if not path.exists():
            raise FileNotFoundError(f'{path} does not exist')
        if cv2.imread(str(path), cv2.IMREAD_REDUCED_GRAYSCALE_8) is None:
            raise ValueError(f'{path} is not an image that can be read')
        other = results.setdefault(path.stem, path)
        if other is not path:
            raise ValueError(f'the results of {other} and {path} would both be {out_dir}/preds/{path.stem}: '
                             'run them apart, with different --out-dir')
        drawn = Path(out_dir, 'vis', path.name)
        if drawn.exists() and drawn.samefile(path):
            raise ValueError(f'the drawn result would replace the image {path}: choose another --out-dir')


def detect(cfg, args):
    """A function that writes the results of one image of a detector."""
    from mmdet.apis import DetInferencer
    inferencer = DetInferencer(cfg, args.checkpoint, args.device, show_progress=False)
    return lambda image: inferencer(str(image), out_dir=args.out_dir, pred_score_thr=args.score_thr,
                                    no_save_pred=False)


def segment(cfg, args):
    """A function that writes the results of one image of a segmenter."""
    from mmseg.apis import MMSegInferencer
    inferencer = MMSegInferencer(cfg, args.checkpoint, device=args.device)
    inferencer.show_progress = False  # of one image; not an argument in all releases
    meta = inferencer.model.dataset_meta
    inferencer.visualizer.set_dataset_meta(**meta)
    masks = Path(args.out_dir, 'preds')
    masks.mkdir(parents=True, exist_ok=True)

    def infer(path):
        sample = inferencer(str(path), return_datasamples=True)
        labels = sample.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8)
        if len(meta['classes']) == 2:
            mask = Image.fromarray(labels * 255)
        else:
            mask = Image.fromarray(labels, 'P')
            mask.putpalette(np.array(meta['palette'], np.uint8).tobytes())
        mask.save(masks / f'{path.stem}.png')
        inferencer.visualizer.add_datasample(path.name, cv2.imread(str(path))[..., ::-1], sample, draw_gt=False,
                                             out_file=str(Path(args.out_dir, 'vis', path.name)))

    return infer


def classify(cfg, args):
    """A function that writes the results of one image of a classifier."""
    from mmpretrain.apis import ImageClassificationInferencer
    inferencer = ImageClassificationInferencer(cfg, args.checkpoint, args.device)
    folder = Path(args.out_dir, 'preds')
    folder.mkdir(parents=True, exist_ok=True)

    def infer(path):
        result, = inferencer(str(path), show_dir=str(Path(args.out_dir, 'vis')))
        result['pred_scores'] = result['pred_scores'].tolist()
        (folder / f'{path.stem}.json').write_text(json.dumps(result))

    return infer


INFERENCERS = {'mmdet': detect, 'mmseg': segment, 'mmpretrain': classify}

if __name__ == '__main__':
    main()
