# VENV is the virtual environment that is made and used. PYTHON, if given, is used instead, as it is.
STACK = onedl
VENV = .venv

ifdef PYTHON
  READY = check-python
  RUN = $(PYTHON)
else
  READY = $(VENV)/ready
  RUN = CUDA_VISIBLE_DEVICES= $(VENV)/bin/python
endif

# Threads that wait by spinning make a machine that has anything else to do many times slower.
export OMP_WAIT_POLICY ?= passive
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

CONFIG = configs/faster_rcnn_r18_kcla_shapes.py
DEMO = work_dirs/demo
SEG_CONFIG = configs/unet_kcla_lesions.py
SEG_DEMO = work_dirs/demo_seg

.PHONY: help demo demo-seg test test-openmmlab check-python

help:
	@echo 'make demo             train a small detector on drawn shapes, print its COCO AP, write pictures'
	@echo 'make demo-seg         train a small UNet on drawn lesions, print its scores, write pictures'
	@echo 'make test             run the tests'
	@echo 'make test-openmmlab   run the tests with the original OpenMMLab releases, in $(VENV)-openmmlab'
	@echo
	@echo 'On the first call the packages are installed into $(VENV); VENV=FOLDER puts them elsewhere.'
	@echo 'PYTHON=/path/to/python uses an environment of your own and installs nothing.'

demo: $(READY)
	$(RUN) tools/draw_shapes.py data/shapes
	$(RUN) tools/train.py $(CONFIG) --work-dir $(DEMO)
	$(RUN) tools/test.py $(CONFIG) "$$(cat $(DEMO)/last_checkpoint)" --work-dir $(DEMO) --show-dir $(DEMO)/pictures
	@echo 'Detections are drawn in $(DEMO)/pictures: the truth on the left, what was found on the right.'

demo-seg: $(READY)
	$(RUN) tools/draw_lesions.py data/lesions
	$(RUN) tools/train.py $(SEG_CONFIG) --work-dir $(SEG_DEMO)
	$(RUN) tools/test.py $(SEG_CONFIG) "$$(cat $(SEG_DEMO)/last_checkpoint)" --work-dir $(SEG_DEMO) \
	    --show-dir $(SEG_DEMO)/pictures --out $(SEG_DEMO)/scores.csv
	@echo 'The scores of each image are in $(SEG_DEMO)/scores.csv, the worst first; what was found and the truth are'
	@echo 'drawn in $(SEG_DEMO)/pictures.'

test: $(READY)
	$(RUN) -m pytest tests

test-openmmlab:
	@$(MAKE) --no-print-directory test STACK=openmmlab VENV=$(VENV)-openmmlab

$(VENV)/ready: requirements/$(STACK).txt requirements/install.sh
	requirements/install.sh requirements/$(STACK).txt $(VENV)

NEEDS = torch mmengine mmcv mmdet
demo-seg: NEEDS = torch mmengine mmcv mmseg

check-python:
	@$(PYTHON) -c "import sys; from importlib.util import find_spec; \
	lacks = [name for name in '$(NEEDS)'.split() if not find_spec(name)]; \
	lacks and sys.exit('error: $(PYTHON) lacks ' + ', '.join(lacks) \
	+ ': install them there, or leave PYTHON out to have all of it installed in $(VENV)')"
