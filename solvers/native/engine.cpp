// The native engine: solves of fixed points and of linear systems, sample by sample, so that the vectors of one
// stay in the cache. Called by solvers/native/__init__.py, which holds the same records.
#include "systems.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
#define FOR_BOTH(NAME, RECORD)                                                \
  EXPORT int64_t NAME##_float(const RECORD* all) { return NAME<float>(*all); } \
  EXPORT int64_t NAME##_double(const RECORD* all) { return NAME<double>(*all); }

FOR_BOTH(turn, Turns)
FOR_BOTH(begin, Systems)
FOR_BOTH(advance, Systems)
FOR_BOTH(settle, Systems)
FOR_BOTH(verify, Systems)
