"""The scores of lesion and polyp segmentation."""
import csv
import os
from pathlib import Path

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmseg.registry import METRICS
from prettytable import PrettyTable

TH_JAC = 0.65  # below it, the Jaccard index of an image counts as 0 in the ISIC 2018 challenge


def ratio(part, whole):
    """part / whole, and 1 where whole is 0: nothing was to be found and nothing was."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    return np.where(whole > 0, part / np.maximum(whole, 1), 1.)


def iou(tp, fp, fn, tn):
    return ratio(tp, tp + fp + fn)


def dsc(tp, fp, fn, tn):
    return ratio(2 * tp, 2 * tp + fp + fn)


@METRICS.register_module()
class LesionMetric(BaseMetric):
    """Scores of a segmentation of lesions (label 1) from background (label 0), in percent.

    Pixels are counted at the size of the ground truth, in each image: true and false positives (tp, fp) and negatives
    (tn, fn).

    =========  ========================================================================================
    pooled: from the counts of all images together, so that large images and large lesions count more
    ---------------------------------------------------------------------------------------------------
    `mIoU`     tp / (tp + fp + fn) of the lesion, which papers on ISIC and Kvasir-SEG call mIoU; background is not
               averaged in
    `DSC`      2 tp / (2 tp + fp + fn), Dice similarity coefficient of the lesion
    `Acc`      (tp + tn) / all
    `Sen`      tp / (tp + fn), sensitivity
    `Spe`      tn / (tn + fp), specificity
    =========  ========================================================================================

    Per image, then averaged over images: `img_IoU` and `img_DSC`, the same formulas (the scores of the ISIC 2017
    challenge, arXiv 1710.05006, and of Kvasir-SEG, arXiv 1911.07069); `th_Jac`, the IoU set to 0 where it is below 0.65
    (the score of ISIC 2018, arXiv 1902.03368).

    A fraction whose denominator is 0 is 1: an empty mask that is predicted empty scores 100.

    Args:
        out_file (str, optional): A CSV file with a row an image, the worst IoU first: its path, IoU and DSC in percent,
            and counts. It is replaced at each evaluation. Defaults to None.
        ignore_index (int): Pixels of this label in the ground truth don't count. Defaults to 255.
        collect_device, prefix, collect_dir: See MMEngine's `BaseMetric`.

    Raises:
        ValueError: If the data set does not have two classes, an image has no ground truth or one of another size than
            the prediction, or there are labels other than 0 and 1.
    """

    def __init__(self, out_file=None, ignore_index=255, collect_device='cpu', prefix=None, collect_dir=None):
        super().__init__(collect_device=collect_device, prefix=prefix, collect_dir=collect_dir)
        self.ignore_index = ignore_index
        self.out_file = out_file and Path(out_file)
        if out_file and self.out_file.suffix.lower() != '.csv':
            raise ValueError(f'out_file must end in .csv, got {out_file}')

    @BaseMetric.dataset_meta.setter
    def dataset_meta(self, dataset_meta):
        classes = dataset_meta.get('classes', ())
        if len(classes) != 2:
            raise ValueError('LesionMetric is for two classes, background and lesion, the data set has '
                             f'{len(classes)}: {classes}')
        self._dataset_meta = dataset_meta

    def process(self, data_batch, data_samples):
        """Counts the pixels of a batch."""
        for sample in data_samples:
            if 'gt_sem_seg' not in sample:
                raise ValueError(f'{sample.get("img_path")} has no ground truth: the pipeline needs LoadBinaryMask')
            prediction = sample['pred_sem_seg']['data'].squeeze()
            truth = sample['gt_sem_seg']['data'].squeeze().to(prediction.device)
            if prediction.shape != truth.shape:
                raise ValueError(f'{sample.get("img_path")}: the prediction is of size {tuple(prediction.shape)}, its '
                                 f'ground truth of {tuple(truth.shape)}: place LoadBinaryMask after Resize')
            valid = truth != self.ignore_index
            cells = (256 * truth.long() + prediction.long())[valid]
            tn, fp, fn, tp = torch.bincount(cells.flatten(), minlength=258)[[0, 1, 256, 257]].tolist()
            if tn + fp + fn + tp != cells.numel():
                labels = [values[valid].long().unique().tolist() for values in (truth, prediction)]
                raise ValueError(f'{sample.get("img_path")}: labels must be 0 and 1, got {labels[0]} in the ground '
                                 f'truth and {labels[1]} in the prediction')
            self.results.append((sample.get('img_path', ''), tp, fp, fn, tn))

    def compute_metrics(self, results):
        """Scores of all images.

        Args:
            results (list[tuple]): Path and tp, fp, fn, tn of each image.

        Returns:
            dict[str, float]: The scores by name, in percent.
        """
        counts = np.array([row[1:] for row in results], np.int64).T
        tp, fp, fn, tn = pooled = counts.sum(1)
        image_iou, image_dsc = iou(*counts), dsc(*counts)
        scores = dict(
            mIoU=iou(*pooled), DSC=dsc(*pooled), Acc=ratio(tp + tn, pooled.sum()), Sen=ratio(tp, tp + fn),
            Spe=ratio(tn, tn + fp), img_IoU=image_iou.mean(), img_DSC=image_dsc.mean(),
            th_Jac=np.where(image_iou < TH_JAC, 0, image_iou).mean())
        scores = {name: round(100 * float(score), 2) for name, score in scores.items()}
        table = PrettyTable(list(scores))
        table.add_row([f'{score:.2f}' for score in scores.values()])
        print_log(f'\n{table}', logger='current')
        if self.out_file:
            self._write([row[0] for row in results], counts, image_iou, image_dsc)
        return scores

    def _write(self, paths, counts, image_iou, image_dsc):
        self.out_file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.out_file.with_name(f'.{self.out_file.name}.{os.getpid()}')
        with open(unfinished, 'w', newline='', encoding='utf-8') as file:
            writer = csv.writer(file)
            writer.writerow(['image', 'IoU', 'DSC', 'tp', 'fp', 'fn', 'tn'])
            for i in np.argsort(image_iou, kind='stable'):
                writer.writerow([paths[i], f'{100 * image_iou[i]:.2f}', f'{100 * image_dsc[i]:.2f}', *counts[:, i]])
        os.replace(unfinished, self.out_file)
