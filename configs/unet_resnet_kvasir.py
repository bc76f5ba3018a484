"""The plain ResNet-UNet that unet_kcla_kvasir.py is compared with: all else is equal, the initial weights too."""
_base_ = './unet_kcla_kvasir.py'
model = dict(backbone=dict(attention=None))
