"""The UNet of unet_kcla_kvasir.py on drawn lesions: minutes on two CPU cores. `make demo-seg` draws, trains, tests."""
_base_ = './unet_kcla_kvasir.py'

model = dict(data_preprocessor=dict(mean=[192.9, 143.2, 117.8], std=[32.5, 33.1, 31.5]))

train_pipeline = _base_.train_pipeline
train_pipeline[4].scale = (96, 96)
test_pipeline = _base_.test_pipeline
test_pipeline[1].scale = (96, 96)
lesions = dict(_delete_=True, type='BinaryLesionDataset', data_root='data/lesions')
train_dataloader = dict(num_workers=1, dataset=dict(ann_file='train.txt', pipeline=train_pipeline, **lesions))
val_dataloader = dict(num_workers=1, dataset=dict(ann_file='val.txt', pipeline=test_pipeline, **lesions))
test_dataloader = val_dataloader

train_cfg = dict(max_epochs=10, val_interval=10)
param_scheduler = dict(T_max=10)
default_hooks = dict(logger=dict(interval=15), checkpoint=dict(interval=10, save_best=None))
