// Steps of iterative methods, sample by sample: a sample's vectors stay in the cache from its first
// product to its last sum.
#include "anderson.h"
#include "systems.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int64_t turn_float(const Turn* turn) { return turn_of_all<float>(*turn); }
EXPORT int64_t turn_double(const Turn* turn) { return turn_of_all<double>(*turn); }
EXPORT void step_float(const Step* step) { step_of_all<float>(*step); }
EXPORT void step_double(const Step* step) { step_of_all<double>(*step); }
EXPORT int64_t move_float(const Move* move) { return move_of_all<float>(*move); }
EXPORT int64_t move_double(const Move* move) { return move_of_all<double>(*move); }
EXPORT int64_t absorb_float(const Cycle* cycle) { return absorb<float>(*cycle); }
EXPORT int64_t absorb_double(const Cycle* cycle) { return absorb<double>(*cycle); }
EXPORT void finish_float(const Cycle* cycle, void* solution, void* left) {
  finish<float>(*cycle, solution, left);
}
EXPORT void finish_double(const Cycle* cycle, void* solution, void* left) {
  finish<double>(*cycle, solution, left);
}
EXPORT int64_t begin_float(const Systems* systems) { return begin<float>(*systems); }
EXPORT int64_t begin_double(const Systems* systems) { return begin<double>(*systems); }
EXPORT int64_t advance_float(const Systems* systems) { return advance<float>(*systems); }
EXPORT int64_t advance_double(const Systems* systems) { return advance<double>(*systems); }
EXPORT void correct_float(const Systems* systems) { correct<float>(*systems); }
EXPORT void correct_double(const Systems* systems) { correct<double>(*systems); }
EXPORT int64_t settled_float(const Systems* systems) { return settled<float>(*systems); }
EXPORT int64_t settled_double(const Systems* systems) { return settled<double>(*systems); }
EXPORT int64_t verify_float(const Systems* systems, const void* image) {
  return verify<float>(*systems, image);
}
EXPORT int64_t verify_double(const Systems* systems, const void* image) {
  return verify<double>(*systems, image);
}
