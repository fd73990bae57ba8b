#include "worker/policy/policies/policies.h"

namespace heavywater {

Budget FullBudget() { return Budget(); }

}  // namespace heavywater
