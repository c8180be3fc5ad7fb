// The native engine: solves of fixed points, sample by sample, so that the vectors of one stay in the cache. Called by
// solvers/native/__init__.py, which holds the same record.
#include "turns.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int64_t turn_float(const Turns* all) { return turn<float>(*all); }
EXPORT int64_t turn_double(const Turns* all) { return turn<double>(*all); }
