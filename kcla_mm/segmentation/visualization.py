"""Pictures of where a lesion is, and where it was found."""
from pathlib import Path

import mmcv
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from mmengine.hooks import Hook
from mmseg.registry import HOOKS, VISUALIZERS
from mmseg.visualization import SegLocalVisualizer

from .metrics import dsc, iou

TRUTH, PREDICTION = '#00e5ff', '#ffd400'
SIDE = 480, 1200  # pixels that the longer side of a picture is brought to: at least, at most
DPI = 100


@VISUALIZERS.register_module()
class LesionVisualizer(SegLocalVisualizer):
    """Draws the contours of a lesion, label 1, as annotated and as predicted, with IoU and DSC in the title.

    Args: those of MMSegmentation's `SegLocalVisualizer`.
    """

    def add_datasample(self, name, image, data_sample=None, draw_gt=True, draw_pred=True, show=False, wait_time=0,
                       out_file=None, step=0, **kwargs):
        """Draws an image and its contours.

        Args:
            name (str): The title.
            image (ndarray): (H, W, 3) uint8, RGB.
            data_sample (SegDataSample, optional): Holds ``gt_sem_seg``, ``pred_sem_seg`` or both, of the image's size.
            draw_gt, draw_pred (bool): Whether to draw them. Default to True.
            show (bool), wait_time (float): Show the picture in a window, for so many seconds.
            out_file (str, optional): Where to write it; without it, the visualisation backends get it.
            step (int): Step for the backends. Defaults to 0.
            **kwargs: Ignored: what `SegLocalVisualizer` has besides.
        """
        def mask(field, wanted):
            has = wanted and data_sample is not None and field in data_sample
            return data_sample.get(field).data.squeeze().cpu().numpy() if has else None

        drawn = draw_contours(image, mask('gt_sem_seg', draw_gt), mask('pred_sem_seg', draw_pred), name)
        self.set_image(drawn)
        if show:
            self.show(drawn, win_name=name, wait_time=wait_time)
        if out_file is not None:
            mmcv.imwrite(drawn[..., ::-1], str(out_file))
        else:
            self.add_image(name, drawn, step)


def draw_contours(image, truth, prediction, title):
    """Draws the contours of label 1 in two masks on an image.

    Args:
        image (ndarray): (H, W, 3) uint8, RGB.
        truth, prediction (ndarray or None): Labels, (H, W).
        title (str): What the picture is of; IoU and DSC are added where there are both masks.

    Returns:
        ndarray: The picture, (H', W', 3) uint8, RGB.
    """
    height, width = image.shape[:2]
    longer = max(height, width)
    zoom = min(max(longer, SIDE[0]), SIDE[1]) / longer / DPI
    figure = Figure(figsize=(max(width * zoom, SIDE[0] / DPI), height * zoom + 0.8), dpi=DPI, layout='constrained')
    axes = figure.add_subplot()
    axes.imshow(image)
    axes.set_axis_off()
    for mask, colour, label in ((truth, TRUTH, 'ground truth'), (prediction, PREDICTION, 'prediction')):
        if mask is None:
            continue
        lesion = np.pad(mask == 1, 1)  # closes contours at the border
        axes.plot([], color=colour, label=label if lesion.any() else f'{label}: none')
        if lesion.any():
            x, y = np.arange(-1, width + 1).clip(-0.5, width - 0.5), np.arange(-1, height + 1).clip(-0.5, height - 0.5)
            axes.contour(x, y, lesion, levels=[0.5], colors=colour, linewidths=1.5)
    if truth is not None and prediction is not None:
        valid = truth != 255
        true, found = (truth == 1) & valid, (prediction == 1) & valid
        counts = [int((a & b).sum()) for a, b in ((true, found), (~true & valid, found), (true, ~found))]
        title += f'\nIoU {100 * iou(*counts, 0):.1f}   DSC {100 * dsc(*counts, 0):.1f}'
    axes.set_title(title, fontsize=10)
    if axes.lines:
        figure.legend(loc='outside lower center', ncols=2, facecolor='#606060', labelcolor='white', fontsize=9)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


@HOOKS.register_module()
class DrawResultsHook(Hook):
    """Draws all that a segmenter predicts in testing, one PNG an image, named as it.

    Args:
        out_dir (str): The folder to write to.
    """

    def __init__(self, out_dir):
        self.out_dir = Path(out_dir)
        self.drawn = set()

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for sample in outputs:
            path = Path(sample.img_path)
            name = path.stem if path.stem not in self.drawn else f'{path.stem}_{len(self.drawn)}'
            self.drawn.add(name)
            image = mmcv.imread(sample.img_path, channel_order='rgb')
            runner.visualizer.add_datasample(path.name, image, sample, out_file=str(self.out_dir / f'{name}.png'))
