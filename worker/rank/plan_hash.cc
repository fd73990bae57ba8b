#include "worker/rank/plan_hash.h"

namespace heavywater {
namespace {

uint64_t Mix(uint64_t x) {  // splitmix64's finalizer
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t HashTerm(uint64_t layer, uint64_t head, uint64_t slot, uint64_t position) {
  return Mix(Mix((layer << 32) | head) ^ ((slot << 32) | position));
}

void AddResident(int layer, int head, int slot, Position position, PlanHash& hash) {
  hash.positions += HashTerm(layer, head, 0, position);
  hash.placement += HashTerm(layer, head, static_cast<uint64_t>(slot) + 1, position);
}

void RemoveResident(int layer, int head, int slot, Position position, PlanHash& hash) {
  PlanHash resident;
  AddResident(layer, head, slot, position, resident);
  hash.positions -= resident.positions;
  hash.placement -= resident.placement;
}

}  // namespace heavywater
