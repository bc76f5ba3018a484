"""UNet with the light KCLA encoder on ISIC 2017: the official training part, chosen on validation, scored on test."""
_base_ = './unet_kcla_isic2018.py'

train_dataloader = dict(dataset=dict(year=2017))
val_dataloader = dict(dataset=dict(year=2017))
test_dataloader = dict(dataset=dict(year=2017))
