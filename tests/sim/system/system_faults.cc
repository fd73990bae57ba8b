// What goes wrong.
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/sim/system/system_simulation.h"

namespace heavywater {

std::string SystemSimulation::Break() {
  if (!faults_) return "";
  // Also one that is about to form.
  if (!missing_ && world_.OneIn(120)) CrashRank();
  if (service_.up() && world_.OneIn(120)) CrashService();
  // A process that has ended, in whatever way, is started again.
  if (!service_.up() && !service_starting_) {
    service_starting_ = true;
    world_.network.After(world_.OneIn(4) ? world_.Millis(1000, 7000) : world_.Millis(20, 1000),
                         [this] {
                           service_starting_ = false;
                           if (wrong_.empty()) wrong_ = StartService();
                         });
  }
  if (world_.OneIn(70)) CutOffRank();
  if (world_.OneIn(12)) ChangeTiers();
  if (world_.OneIn(150)) DamagePage();
  return wrong_;
}

void SystemSimulation::CrashRank() {
  const int rank = world_.Between(0, size() - 1);
  world_.trace.Note("crash of a rank", static_cast<uint64_t>(rank));
  if (world_.OneIn(3)) StandStill(*processes_[rank]);
  processes_[rank]->Kill();
  stopped_ = true;
  missing_ = true;
  // The others notice, and a process takes its place: in either order.
  world_.network.After(world_.Millis(50, 4000), [this] { Stop(); });
  world_.network.After(world_.Millis(100, 4000), [this, rank] {
    dead_.push_back(std::move(processes_[rank]));
    processes_[rank] = NewProcess(rank);
    processes_[rank]->link().Join(0);
    missing_ = false;
  });
}

// It does not end, and wakes when another has its place. What it still writes of each text is
// the token that came next.
void SystemSimulation::StandStill(SimProcess& process) {
  using Key = std::tuple<SequenceId, int, int>;
  auto rows = std::make_shared<std::map<Key, std::vector<std::byte>>>();
  for (const auto& [id, position] : process.tier().Published()) {
    for (const auto& talk : talks_) {
      if (talk->id != id || talk->where != Talk::Where::kRunning) continue;
      const auto known = static_cast<int64_t>(talk->text.size());
      const int32_t token =
          position < known ? talk->text[static_cast<size_t>(position)] : talk->TokenAt(position);
      for (int layer = 0; layer < group_options_.num_layers; ++layer) {
        for (int head = 0; head < group_options_.kv_heads; ++head) {
          (*rows)[{id, layer, head}] = RowBytes(layer, head, token, position);
        }
      }
    }
  }
  SimHostTier* const tier = &process.tier();  // kept until the end
  world_.network.After(world_.Millis(100, 15000), [tier, rows] {
    tier->EndStep([rows](SequenceId id, int layer, int head) {
      const auto found = rows->find({id, layer, head});
      return found == rows->end() ? std::span<const std::byte>() : std::span(found->second);
    });
  });
}

void SystemSimulation::CrashService() {
  if (world_.OneIn(2)) {
    service_.CrashAfter(world_.Between(1, 6));  // within some call
    return;
  }
  world_.trace.Note("crash of the cache service");
  service_.Crash();
}

std::string SystemSimulation::StartService() {
  if (service_.up()) return "";
  const absl::Status started = service_.Start();
  world_.trace.Note("start of the cache service", static_cast<uint64_t>(service_.process()));
  return started.ok() ? "" : absl::StrCat("the cache service does not start: ", started.ToString());
}

void SystemSimulation::CutOffRank() {
  SimProcess& process = *processes_[world_.Between(0, size() - 1)];
  if (process.caller().cut_off || !process.caller().alive) return;
  world_.trace.Note("a rank is cut off", static_cast<uint64_t>(process.link().options().rank));
  process.caller().cut_off = true;
  const SimCallerPtr caller = process.link().caller();
  world_.network.After(world_.OneIn(3) ? world_.Millis(1000, 15000) : world_.Millis(50, 1000),
                       [caller] { caller->cut_off = false; });
}

void SystemSimulation::ChangeTiers() {
  SimMedium& medium = world_.OneIn(2) ? service_.disk : service_.remote;
  switch (world_.Between(0, 4)) {
    case 0:
      medium.reachable = false;
      world_.trace.Note("a tier is away");
      break;
    case 1:
      medium.puts_left = world_.Between(0, 6);
      world_.trace.Note("a tier is full");
      break;
    default:
      medium.reachable = true;
      medium.puts_left = std::numeric_limits<int64_t>::max();
  }
}

void SystemSimulation::DamagePage() {
  SimMedium& medium = world_.OneIn(2) ? service_.disk : service_.remote;
  if (medium.pages.empty()) return;
  auto page = medium.pages.begin();
  std::advance(page, static_cast<int64_t>(world_.random() % medium.pages.size()));
  if (world_.OneIn(2)) {
    page->second.back() ^= std::byte{1};
    world_.trace.Note("a page is damaged");
  } else {
    medium.pages.erase(page);
    world_.trace.Note("a page is lost");
  }
  damaged_ = true;
}

void SystemSimulation::Heal() {
  for (SimMedium* medium : {&service_.disk, &service_.remote}) {
    medium->reachable = true;
    medium->puts_left = std::numeric_limits<int64_t>::max();
  }
  for (const auto& process : processes_) process->caller().cut_off = false;
  world_.network.SetLoss(0);
  world_.calm = true;
  if (!service_.up() && wrong_.empty()) wrong_ = StartService();
  service_.CrashAfter(std::numeric_limits<int64_t>::max());
}

}  // namespace heavywater
