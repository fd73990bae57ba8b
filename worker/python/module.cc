// heavywater._engine: what heavywater/engine.py documents and types for its callers.
#include "worker/python/module.h"

#include <nanobind/nanobind.h>

NB_MODULE(_engine, module) {
  heavywater::BindOptions(module);
  heavywater::BindGroup(module);
  heavywater::BindEngine(module);
}
