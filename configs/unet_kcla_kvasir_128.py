"""unet_kcla_kvasir.py for a small budget: 128 x 128 pixels, 20 epochs, one cosine, the last epoch is scored."""
_base_ = './unet_kcla_kvasir.py'

train_pipeline = _base_.train_pipeline
train_pipeline[4].scale = (128, 128)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = (128, 128)
train_dataloader = dict(num_workers=1, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(num_workers=1, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=20, val_interval=20)
param_scheduler = dict(T_max=20)
default_hooks = dict(checkpoint=dict(interval=20, save_best=None))
