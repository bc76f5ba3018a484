"""UNet with the light KCLA encoder on ISIC 2018: the official training part, chosen on validation, scored on test."""
_base_ = './unet_kcla_kvasir.py'

model = dict(data_preprocessor=dict(mean=[186.9, 155.2, 141.8], std=[39.9, 44.1, 49.8]))  # of 600 training images

train_dataloader = dict(
    dataset=dict(_delete_=True, type='ISICDataset', data_root='data', year=2018, part='train',
                 pipeline=_base_.train_pipeline))
val_dataloader = dict(
    dataset=dict(_delete_=True, type='ISICDataset', data_root='data', year=2018, part='val',
                 pipeline=_base_.test_pipeline))
test_dataloader = dict(
    dataset=dict(_delete_=True, type='ISICDataset', data_root='data', year=2018, part='test',
                 pipeline=_base_.test_pipeline))
