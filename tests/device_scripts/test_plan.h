// test_plan.h: plans by hand, for tests of what runs them.
#ifndef EDGESDK_TESTS_TEST_PLAN_H_
#define EDGESDK_TESTS_TEST_PLAN_H_

#include <stdint.h>

#include <utility>
#include <vector>

#include "plan.h"

inline const int64_t kFour[] = {4};
inline const int64_t kTwoByTwo[] = {2, 2};
inline const int64_t kNone[] = {0, 3};
inline const char* const kNoFeatures[] = {nullptr};

// A plan and what it points to.
struct TestPlan {
  std::vector<edgert_port> inputs;
  std::vector<edgert_port> outputs;
  std::vector<edgert_tensor> tensors;
  std::vector<edgert_step> steps;
  std::vector<std::vector<uint32_t>> args;
  alignas(64) unsigned char weights[128] = {0};
  uint64_t arena_bytes = 0;
  const edgert_accelerator* accelerator = nullptr;
  std::vector<edgert_image> images;
  uint64_t device_arena_bytes = 0;
  edgert_plan plan;

  // A step's arguments must not move: give all steps before the first use.
  void Step(TVMFFISafeCallType kernel, const char* name, std::vector<uint32_t> indices,
            const edgert_launch* launch = nullptr) {
    args.push_back(std::move(indices));
    steps.push_back(
        {kernel, name, name, nullptr, static_cast<uint32_t>(args.back().size()), launch});
  }

  const edgert_plan& Finish() {
    for (size_t i = 0; i < steps.size(); ++i) steps[i].args = args[i].data();
    plan = edgert_plan{"plan",
                       "test",
                       "id",
                       kNoFeatures,
                       inputs.data(),
                       outputs.data(),
                       tensors.data(),
                       steps.data(),
                       static_cast<uint32_t>(inputs.size()),
                       static_cast<uint32_t>(outputs.size()),
                       static_cast<uint32_t>(tensors.size()),
                       static_cast<uint32_t>(steps.size()),
                       weights,
                       sizeof(weights),
                       arena_bytes,
                       accelerator,
                       images.data(),
                       static_cast<uint32_t>(images.size()),
                       device_arena_bytes};
    return plan;
  }
};

#endif  // EDGESDK_TESTS_TEST_PLAN_H_
