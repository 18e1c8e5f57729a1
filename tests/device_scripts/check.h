// check.h: as much of a test framework as these tests need.
//
//   TEST(adds_up) { CHECK_EQ(1 + 1, 2); }
//   int main(int argc, char** argv) { return check::Main(argc, argv); }
//
// The program runs all tests, or those named in its arguments; its exit code says whether all
// checks held. CHECK may be used on any thread.
#ifndef EDGESDK_TESTS_CHECK_H_
#define EDGESDK_TESTS_CHECK_H_

#include <atomic>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
  const char* name;
  void (*function)();
};

inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}

inline std::atomic<int>& Failures() {
  static std::atomic<int> failures{0};
  return failures;
}

struct Registration {
  Registration(const char* name, void (*function)()) { Tests().push_back({name, function}); }
};

inline void Fail(const char* file, int line, const std::string& what) {
  Failures().fetch_add(1);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

template <typename A, typename B>
void Equal(const char* file, int line, const char* text, const A& actual, const B& wanted) {
  if (actual == wanted) return;
  std::ostringstream message;
  message << text << " is " << actual << ", should be " << wanted;
  Fail(file, line, message.str());
}

inline int Main(int argc, char** argv) {
  int ran = 0;
  for (const Test& test : Tests()) {
    bool wanted = argc == 1;
    for (int i = 1; i < argc; ++i) wanted = wanted || std::strcmp(argv[i], test.name) == 0;
    if (!wanted) continue;
    ++ran;
    int before = Failures().load();
    test.function();
    std::printf("%s %s\n", Failures().load() == before ? "ok    " : "FAILED", test.name);
    std::fflush(stdout);
  }
  if (ran == 0) std::fprintf(stderr, "no such test\n");
  return ran == 0 || Failures().load() != 0 ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                                   \
  static void name();                                                \
  static const check::Registration registration_##name(#name, name); \
  static void name()

#define CHECK(condition) \
  ((condition) ? (void)0 : check::Fail(__FILE__, __LINE__, "not so: " #condition))
#define CHECK_EQ(actual, wanted) check::Equal(__FILE__, __LINE__, #actual, actual, wanted)
#define CHECK_TEXT(actual, wanted) CHECK_EQ(std::string(actual), std::string(wanted))

#endif  // EDGESDK_TESTS_CHECK_H_
