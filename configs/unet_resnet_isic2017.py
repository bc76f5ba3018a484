"""The plain ResNet-UNet that unet_kcla_isic2017.py is compared with: all else is equal, the initial weights too."""
_base_ = './unet_kcla_isic2017.py'
model = dict(backbone=dict(attention=None))
