# The whole vocabulary of the project. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
export VENV ?= .venv
# A system is a dozen processes, and tests start hundreds: each would compile what it imports anew.
unexport PYTHONDONTWRITEBYTECODE
PY := $(VENV)/bin/python
TESTS ?= libs services tests tools
# All tests on whole systems lie there: the others' modules need not be imported for them.
SYSTEMS := $(if $(filter file,$(origin TESTS)),tests,$(TESTS))
JOBS ?= 2
PYTEST := $(PY) -m pytest
# A test that hangs ends the run, with its name and where its threads are.
LIMITED := --max-worker-restart 0 -o faulthandler_timeout=240 -o faulthandler_exit_on_timeout=true
# Status 5 says that a folder has no tests of the kind: no failure when one folder is asked for.
OR_NONE := || [ $$? -eq 5 ]

.PHONY: help demo demo-groups up test fuzz-archives fuzz-manifests test-e2e test-chaos test-chaos-groups test-hostile test-compose test-clients test-streams test-s3 test-ui test-bundle test-gpu bundle check format docs bench-cold-start bench-groups bench-cache bench-cache-real bench-control bench-scheduler bench-simulator bench-validation bench-failover bench-engine-death bench-engine-cpu bench-engine-gpu bench-served-gpu bench-starvation bench-floods bench-gateway bench-attention-gpu bench-products-gpu bench-products-fp8-gpu bench-chunks-gpu bench-host-memory-gpu bench-promises bench-kv-return bench-dataplane bench-local-fetch bench-pictures soak soak-served lock clean bench-cache-gpu bench-groups-tokens bench-groups-busy bench-groups-gpu bench-materialize fuzz-bodies bench-medusa bench-medusa-traces bench-medusa-results bench-overload

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo:  ## the whole system on this machine, one cold and one warm chat, the cold start as a waterfall
	@tools/bootstrap.sh runtime
	@$(VENV)/bin/pilotlight demo

demo-groups:  ## a cold start that four nodes share, beside one that one node has, each as a waterfall: three minutes
	@tools/bootstrap.sh runtime
	@$(PY) bench/groups.py

up:  ## start the system with the demo model and keep it running until Ctrl-C
	@tools/bootstrap.sh runtime
	@$(VENV)/bin/pilotlight up --with-demo-model

test:  ## unit and contract tests, then one whole system from its start to its end: 25 minutes on two cores; TESTS=folders
	@tools/bootstrap.sh dev
	@$(PYTEST) $(TESTS) -m "not compose and not ceph and not gpu and not bundle and not e2e and not chaos and not hostile and not browser and not clients" --numprocesses $(JOBS) --dist loadfile $(LIMITED) $(OR_NONE)
	@$(PYTEST) $(SYSTEMS) -m smoke $(OR_NONE)

test-e2e:  ## every other test on whole systems, with a part of the kill matrix, of the schedules and of the upgrades: 20 minutes on two cores
	@tools/bootstrap.sh dev
	@$(PYTEST) $(SYSTEMS) -m "e2e and not smoke" --numprocesses $(JOBS) --dist loadfile --durations=20 $(OR_NONE)

test-chaos:  ## kill, stop and cut off everything in every situation; count what was lost
	@tools/bootstrap.sh dev
	@$(PYTEST) tests/chaos tests/upgrade libs/dataplane/tests -m chaos --durations=10

test-chaos-groups:  ## seeded schedules of faults on groups of stages; goes on where LINES=FILE ends: SEEDS=0-235
	@tools/bootstrap.sh dev
	@PILOTLIGHT_CHAOS_SEEDS=$(or $(SEEDS),0-235) PILOTLIGHT_CHAOS_LINES="$(LINES)" PILOTLIGHT_CHAOS_LOG=1 $(PYTEST) tests/chaos/test_chaos_groups.py -k test_groups -m chaos

test-hostile:  ## floods and other attacks on a whole system, with their figures as JSON
	@tools/bootstrap.sh dev
	@$(PYTEST) tests/hostile -m hostile -s

fuzz-bodies:  ## bodies that are almost requests, against a whole system; statuses and memory as JSON: COUNT=, SEED=
	@tools/bootstrap.sh dev
	@PILOTLIGHT_FUZZ_BODIES=$(or $(COUNT),100000) PILOTLIGHT_FUZZ_SEED=$(or $(SEED),20) $(PYTEST) tests/hostile/test_hostile_fuzzed_bodies.py -m hostile -s -o faulthandler_timeout=3600

test-compose:  ## build the containers, run the system with docker compose, break it, take it down
	@tools/bootstrap.sh dev
	@tools/test_compose.sh

test-clients:  ## clients of OpenAI's, Anthropic's and Ollama's APIs: our tests with their libraries, then their own tests, LangChain's, vLLM's, LiteLLM, lm-eval and Node
	@tools/bootstrap.sh dev
	@$(PYTEST) services/gateway/tests/test_gateway_openai_*.py services/gateway/tests/test_gateway_surfaces_*.py $(LIMITED)
	@tools/test_clients.sh

test-streams:  ## 64 streams at a time for a minute, of which half leave: the server counts what its clients do. SECONDS=
	@tools/bootstrap.sh dev
	@PILOTLIGHT_STREAMS_S=$(or $(SECONDS),60) $(PYTEST) tests/e2e/test_e2e_usage.py -k half_leave

test-s3:  ## the S3 tests against Ceph's server, which is installed where it is missing
	@tools/bootstrap.sh dev
	@tools/test_s3.sh

test-ui:  ## the dashboard in Debian's Chromium, which is installed where it is missing: flows, accessibility, pictures, thousands of rows
	@tools/bootstrap.sh dev
	@tools/test_ui.sh

test-bundle:  ## make an offline archive for this Python, install it without a network, run the demo from it
	@tools/bootstrap.sh dev
	@$(PYTEST) tools/tests -m bundle

test-gpu:  ## on a machine with a GPU: test it with the archive in BUNDLE=FOLDER, or with what is there; JSON, then PASS or FAIL
	@$(or $(PYTHON),python3) tools/test_gpu.py $(if $(BUNDLE),--bundle "$(BUNDLE)")

bundle:  ## the offline installation archive in dist/: PYTHON=3.11 or 3.12; WITH_TORCH=1 puts torch in
	@env -u PYTHON tools/bootstrap.sh runtime
	@$(PY) tools/bundle/build.py $(if $(PYTHON),--python "$(PYTHON)") $(if $(WITH_TORCH),--with-torch)

fuzz-archives:  ## a million broken archives of graphs and kernel images for the parser, with sanitizers, as JSON: MUTATIONS=, SEED=
	@tools/bootstrap.sh dev
	@$(PY) tests/support/archive_fuzz.py $(if $(MUTATIONS),--mutations $(MUTATIONS)) $(if $(SEED),--seed $(SEED))

fuzz-manifests:  ## a million broken manifests of artifacts for worker and engine: MUTATIONS=
	@tools/bootstrap.sh dev
	@PILOTLIGHT_FUZZ_MUTATIONS=$(or $(MUTATIONS),1000000) $(PYTEST) services/worker/tests/test_worker_artifacts.py services/worker/tests/test_worker_graphs.py -k no_mutation -o faulthandler_timeout=3600

check:  ## lint, format, types, layers, generated pages
	@tools/bootstrap.sh dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(PY) tools/generate_docs.py --check

format:  ## format and fix what can be fixed
	@tools/bootstrap.sh dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs:  ## render the generated pages: settings, states
	@tools/bootstrap.sh dev
	$(PY) tools/generate_docs.py

bench-cold-start:  ## cold and warm first tokens of the demo model on this machine, as JSON
	@tools/bootstrap.sh runtime
	@$(PY) bench/cold_start.py

bench-groups:  ## starts that nodes share behind links that tc shapes: stages, the ladder of techniques, bursts; into bench/results; needs root. PARTS=, ROUNDS=, ARGS='--set NAME=VALUE'
	@tools/bootstrap.sh runtime
	@$(PY) bench/group_starts/run.py $(if $(PARTS),--parts $(PARTS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench-groups-gpu:  ## starts from host memory that two GPUs of this machine share, and pauses while they become one, as JSON: ARGS='--shape 4B --rounds 3'; PYTHON= an environment that has everything
	@$(or $(PYTHON),$(PY)) bench/groups_gpu.py $(ARGS)

bench-groups-tokens:  ## tokens over time of one long request that a group answers, with and without scaling down, as JSON: ARGS='--stages 2'
	@tools/bootstrap.sh runtime
	@$(PY) bench/groups_tokens.py $(ARGS)

bench-groups-busy:  ## how much of the time each stage of a group computes, by requests at once, beside one worker, as JSON: ARGS='--stages 1 2 --requests 1 2 8'
	@tools/bootstrap.sh runtime
	@$(PY) bench/groups_busy.py $(ARGS)

bench-cache:  ## what waits for loads under each eviction policy, beside bounds, as JSON: PARTS=, POLICIES=, SEEDS=, JOBS=processes
	@tools/bootstrap.sh dev
	@$(PY) bench/cache.py $(if $(PARTS),--parts $(PARTS)) $(if $(POLICIES),--policies $(POLICIES)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS))

bench-cache-real:  ## eviction policies in the whole system beside their simulation, as JSON, on a quiet machine in half an hour: POLICIES=, REQUESTS=, DURATION_S=, REPEATS=
	@tools/bootstrap.sh runtime
	@$(PY) bench/cache_real.py $(if $(POLICIES),--policies $(POLICIES)) $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(DURATION_S),--duration-s $(DURATION_S)) $(if $(REPEATS),--repeats $(REPEATS))

bench-cache-gpu:  ## models that share this machine's GPU: by where they are, and under Zipf's law, as JSON; parts resume: PARTS=, OUT=, WEIGHTS=, REQUESTS=; TINY=1 KIND=cpu tries it; PYTHON= an environment that has everything
	@$(or $(PYTHON),$(PY)) bench/cache_gpu.py $(if $(PARTS),--parts $(PARTS)) $(if $(OUT),--out "$(OUT)") $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(if $(REQUESTS),--requests $(REQUESTS)) $(if $(KIND),--kind $(KIND)) $(if $(TINY),--tiny)

bench-scheduler:  ## ParaServe's figures in simulated time, all policies, as JSON: FULL=1, SECONDS=, SEEDS=, JOBS=, LINES=FILE (resumes), OUT=
	@tools/bootstrap.sh dev
	@$(PY) bench/scheduler.py $(if $(FULL),--full) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(LINES),--lines "$(LINES)") $(if $(OUT),--out "$(OUT)")

bench-simulator:  ## processor time of a million simulated requests, one process, as JSON: RUNS=, OUT=
	@tools/bootstrap.sh dev
	@$(PY) bench/simulator.py $(if $(RUNS),--runs $(RUNS)) $(if $(OUT),--out "$(OUT)")

bench-validation:  ## predictions of starts, and the simulator, against a real cluster behind shaped links, as JSON; needs root. PARTS=, STARTS=, SEEDS=, SECONDS=
	@$(PY) bench/validation/run.py $(if $(PARTS),--parts $(PARTS)) $(if $(STARTS),--starts $(STARTS)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS))

bench-control:  ## what control costs in a cluster of 8,000 workers and 10,000 models, as JSON: PARTS=live ticks, STARTS=a second, PLAYERS=processes, NODES=, MODELS=, OUT=, COMMIT=; PYTHON= an environment that has everything
	@$(if $(PYTHON),,tools/bootstrap.sh runtime)
	@$(or $(PYTHON),$(PY)) bench/control.py $(if $(PARTS),--parts $(PARTS)) $(if $(STARTS),--starts-per-s $(STARTS)) $(if $(PLAYERS),--players $(PLAYERS)) $(if $(NODES),--nodes $(NODES)) $(if $(MODELS),--models $(MODELS)) $(if $(OUT),--out "$(OUT)") $(if $(COMMIT),--commit "$(COMMIT)")

bench-failover:  ## how long nobody leads when the leading scheduler dies or stops, as JSON
	@tools/bootstrap.sh runtime
	@$(PY) bench/failover.py

bench-engine-death:  ## how long a stream pauses when every engine of its node is killed, as JSON
	@tools/bootstrap.sh runtime
	@$(PY) bench/engine_death.py

bench-engine-cpu:  ## tokens per second of the engine and its peers on this CPU, as JSON: VLLM=, LLAMA=interpreters that have them
	@tools/bootstrap.sh dev
	@$(PY) bench/engine_cpu.py $(if $(VLLM),--vllm "$(VLLM)") $(if $(LLAMA),--llama "$(LLAMA)")

bench-engine-gpu:  ## the engine on this machine's GPU, beside vLLM if VLLM= names an interpreter that has it, as JSON; PYTHON= an environment that has everything, SHAPES=, ROWS=, LIMIT_S= of each shape
	@$(or $(PYTHON),$(PY)) bench/engine_gpu.py --profile $(if $(VLLM),--vllm "$(VLLM)") $(if $(SHAPES),--shapes $(SHAPES)) $(if $(ROWS),--rows "$(ROWS)") $(if $(LIMIT_S),--limit-s $(LIMIT_S))

bench-served-gpu:  ## the whole system on this machine's GPU beside `vllm serve` of the interpreter VLLM=, as JSON; parts resume: PARTS=, OUT=, WEIGHTS=; ROWS='azure' or '64 concurrent,16/s' some rows; GATEWAYS=; QUICK=1; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/served_gpu.py --profile $(if $(VLLM),--vllm "$(VLLM)") $(if $(PARTS),--parts $(PARTS)) $(if $(OUT),--out "$(OUT)") $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(if $(ROWS),--rows "$(ROWS)") $(if $(GATEWAYS),--gateways $(GATEWAYS)) $(if $(QUICK),--quick)

bench-starvation:  ## more models than places, all wanted all the time, as JSON: DURATION_S=, MODELS=, PLACES=, MAX_TOKENS=
	@tools/bootstrap.sh runtime
	@$(PY) bench/starvation.py $(if $(DURATION_S),--duration-s $(DURATION_S)) $(if $(MODELS),--models $(MODELS)) $(if $(PLACES),--places $(PLACES)) $(if $(MAX_TOKENS),--max-tokens $(MAX_TOKENS))

bench-floods:  ## what floods of bodies do to the gateway's memory and to other clients, as JSON
	@tools/bootstrap.sh dev
	@$(PYTEST) tests/hostile/test_hostile_floods.py -m hostile -s -q

bench-gateway:  ## what the gateway costs with an engine that takes no time, beside others, as JSON: PEERS=interpreter that has them, PARTS=, ROUNDS=
	@tools/bootstrap.sh runtime
	@$(PY) bench/gateway.py $(if $(PEERS),--peers-python "$(PEERS)") $(if $(PARTS),--parts $(PARTS)) $(if $(ROUNDS),--rounds $(ROUNDS))

bench-products-gpu:  ## products of few rows on this machine's GPU by how they are cut up, beside torch's, as JSON: ARGS='--shapes 8B 4B'; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/products_gpu.py $(ARGS)

bench-products-fp8-gpu:  ## the same with weights in fp8, beside today's tilings and bfloat16, as JSON: ARGS='--tokens 64 --scales block row'; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/products_fp8_gpu.py $(ARGS)

bench-attention-gpu:  ## prefill attention on this machine's GPU by head width and tile: time, registers, spills, as JSON: ARGS='--tokens 1360 --behind 2720'; PYTHON= an environment that has everything
	@$(or $(PYTHON),$(PY)) bench/attention_gpu.py $(ARGS)

bench-chunks-gpu:  ## how much of a long prompt a step takes beside running requests, on this machine's GPU, as JSON: ARGS='--shape 4B --chunks 0 1024'; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/chunks_gpu.py $(ARGS)

bench-host-memory-gpu:  ## what it takes to register host memory of several kinds with this machine's GPU, and who waits meanwhile, as JSON: ARGS='--kinds tmpfs driver --gib 4'; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/host_memory_gpu.py $(ARGS)

bench-promises:  ## goodput of an instance that is asked too much, with and without promises kept, in simulated time, as JSON
	@tools/bootstrap.sh runtime
	@$(PY) bench/promises.py

bench-kv-return:  ## KV on loan goes back on this machine's GPU, three ways by turns, as JSON: SECONDS=, ROUNDS=; PYTHON= an environment that has everything
	@$(or $(PYTHON),$(PY)) bench/kv_return.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ROUNDS),--rounds $(ROUNDS))

bench-materialize:  ## what recorded graphs save a start on this machine's GPU, beside captures at the start, as JSON: SHAPES=, WAYS=, REPEATS=, SECONDS=, OUT=, COMMIT=; WAYS="process node up" are whole systems, KIND=cpu TINY=1 tries those; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/materialize.py $(if $(TINY),--shapes tiny,$(if $(SHAPES),--shapes $(SHAPES))) $(if $(KIND),--kind $(KIND)) $(if $(WAYS),--ways $(WAYS)) $(if $(REPEATS),--repeats $(REPEATS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUT),--out "$(OUT)") $(if $(COMMIT),--commit "$(COMMIT)")

bench-medusa:  ## the loading phase of the ten models of MEDUSA's table on this machine's GPU, by stage and way, with nodes of graphs and builds by part, as JSON; goes on where LINES=FILE ends: SHAPES=, WAYS=, SECONDS=, OUT=, COMMIT=, VLLM=interpreter; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/medusa.py $(if $(SHAPES),--shapes $(SHAPES)) $(if $(WAYS),--ways $(WAYS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(VLLM),--vllm "$(VLLM)") $(if $(LINES),--lines "$(LINES)") $(if $(OUT),--out "$(OUT)") $(if $(COMMIT),--commit "$(COMMIT)")

bench-medusa-traces:  ## first tokens under Poisson arrivals in simulated time, by how models are loaded, from what bench-medusa measured (bench/results, or LINES=FILE), as JSON: SHAPE=, OUT=, COMMIT=
	@tools/bootstrap.sh runtime
	@$(PY) bench/medusa_traces.py $(if $(LINES),--lines "$(LINES)") $(if $(SHAPE),--shape $(SHAPE)) $(if $(OUT),--out "$(OUT)") $(if $(COMMIT),--commit "$(COMMIT)")

bench-medusa-results:  ## what bench-medusa wrote into LINES="FILE ..." becomes part of bench/results, with the traces and the pictures made from it; prints its table: SHAPE=
	@tools/bootstrap.sh runtime
	@$(PY) bench/medusa_rows.py bench/results/medusa.json $(LINES)
	@$(MAKE) --no-print-directory bench-medusa-traces LINES=bench/results/medusa.json OUT=bench/results/medusa_traces.json
	@$(MAKE) --no-print-directory bench-pictures

bench-dataplane:  ## fetch beside its peers, aggregated bandwidth, chains, serving beside one, as JSON; needs root. PEERS=interpreter, ROUNDS=, PARTS=
	@tools/bootstrap.sh dev
	@$(PY) bench/dataplane/run.py $(if $(PEERS),--peers-python "$(PEERS)") $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PARTS),--parts $(PARTS))

bench-local-fetch:  ## a file that the system has in memory into the host pool, beside what the machine can do, as JSON: MIB=, OUT=, PEERS=interpreter; PYTHON= as above
	@$(or $(PYTHON),$(PY)) bench/dataplane/local_fetch.py $(if $(MIB),--mib $(MIB)) $(if $(OUT),--out "$(OUT)") $(if $(PEERS),--peers-python "$(PEERS)") $(if $(COMMIT),--commit "$(COMMIT)")

bench-pictures:  ## the pictures in docs/pictures, from the results in bench/results
	@tools/bootstrap.sh dev
	@$(VENV)/bin/uv run --no-project --isolated --python $(PY) --with matplotlib==3.11.2 bench/pictures.py bench/results docs/pictures

soak:  ## the whole system under 20,000 requests, 64 at once; no process may grow. JSON. SOAK_REQUESTS=, SOAK_AT_ONCE=
	@tools/bootstrap.sh runtime
	@$(PY) bench/soak.py $(if $(SOAK_REQUESTS),--requests $(SOAK_REQUESTS)) $(if $(SOAK_AT_ONCE),--at-once $(SOAK_AT_ONCE))

soak-served:  ## the whole system at 80 % of what it can, for 30 minutes: no error, no growth, p99 flat. JSON. DURATION_S=, SHARE=; on a GPU: SHAPE=, WEIGHTS=, PYTHON=; LIMIT_S= for all of it
	@$(if $(PYTHON),,tools/bootstrap.sh runtime)
	@$(or $(PYTHON),$(PY)) bench/soak_served.py $(if $(DURATION_S),--duration-s $(DURATION_S)) $(if $(SHARE),--share $(SHARE)) $(if $(SHAPE),--shape $(SHAPE)) $(if $(WEIGHTS),--weights "$(WEIGHTS)") $(if $(LIMIT_S),--limit-s $(LIMIT_S))

bench-overload:  ## a gateway that is asked for twice what it can do, then for 80 % of it: answers, refusals, p50 and p99, processor and memory, as JSON: DURATION_S=, TIMES=, SHARE=, STEP_MS=, OUT=; PYTHON= as above
	@$(if $(PYTHON),,tools/bootstrap.sh runtime)
	@$(or $(PYTHON),$(PY)) bench/overload.py $(if $(STEP_MS),--step-ms $(STEP_MS)) $(if $(DURATION_S),--duration-s $(DURATION_S)) $(if $(TIMES),--times $(TIMES)) $(if $(SHARE),--share $(SHARE)) $(if $(OUT),--out "$(OUT)")

lock:  ## compile constraints.txt anew from the members' requirements
	@tools/bootstrap.sh dev
	tools/lock.sh

clean:  ## remove the environment, caches and the demo's state; your own state in .pilotlight stays
	rm -rf $(VENV) .pilotlight/demo .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
