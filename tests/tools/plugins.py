"""What configs of these tests import: a detector that knows the truth, and a record of losses."""
import json

import torch
from mmdet.models.detectors import BaseDetector
from mmdet.registry import HOOKS, MODELS
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.structures import InstanceData


@MODELS.register_module()
class JitteredTruth(BaseDetector):
    """Finds the annotated objects, boxes and masks moved a little, some of them missing, all with random scores."""

    def __init__(self, data_preprocessor):
        super().__init__(data_preprocessor)
        self.parameter = torch.nn.Parameter(torch.zeros(()))

    def predict(self, inputs, data_samples, rescale=True):
        results = []
        for sample in data_samples:
            generator = torch.Generator().manual_seed(int(sample.img_id))
            truth = sample.gt_instances
            shift = 1 + sample.img_id % 3
            masks = truth.masks.to_tensor(torch.bool, inputs.device).roll(shift, 2)
            results.append(InstanceData(
                bboxes=truth.bboxes + shift, labels=truth.labels, masks=masks,
                scores=torch.rand(len(truth), generator=generator))[:max(1, len(truth) - 1)])
        return self.add_pred_to_datasample(data_samples, results)

    def loss(self, inputs, data_samples):
        raise NotImplementedError

    _forward = extract_feat = loss


@HOOKS.register_module()
class RecordLosses(Hook):
    """Writes the losses of each process to losses-RANK.json."""

    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append({name: float(value) for name, value in outputs.items()})

    def after_train(self, runner):
        with open(f'{runner.work_dir}/losses-{get_rank()}.json', 'w') as file:
            json.dump(self.losses, file)
