/* What this machine can do at most, one thread: multiply-adds, and reading memory.
 *
 * Build with -O3 -march=native; prints "FLOP/s bytes/s", each the best of several tries, in CPU
 * time, so that other programs do not lower it. Vectors are as wide as the compiler says the
 * target's are. 12 or more independent sums hide the latency of a multiply-add.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#if defined(__x86_64__)
#define KEEP_IN_REGISTER(x) __asm__ volatile("" : "+v"(x))
#else
#define KEEP_IN_REGISTER(x) __asm__ volatile("" : "+w"(x))
#endif
#define SUMS 12
#define TRIES 15

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));

static double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Named one by one: an array would live in memory. */
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define DECLARE(i) vector sum##i = factor;
#define STEP(i) sum##i = sum##i * factor + summand;
#define KEEP(i) KEEP_IN_REGISTER(sum##i);
#define ADD(i) used += sum##i[0];

static double flops(void) {
  const long iterations = 4 * 1000 * 1000;
  vector factor, summand;
  for (int lane = 0; lane < LANES; ++lane) {
    factor[lane] = 0.999f;
    summand[lane] = 0.001f;
  }
  EACH(DECLARE)
  double start = now_s();
  for (long n = 0; n < iterations; ++n) {
    EACH(STEP)
    EACH(KEEP) /* and keep the loop as it is written */
  }
  double seconds = now_s() - start;
  float used = 0;
  EACH(ADD)
  if (used == 42.0f) puts("");
  return 2.0 * SUMS * LANES * (double)iterations / seconds;
}

/* Reads `size` bytes: far more than the second-level cache, once after the other. */
static double bandwidth(const vector *data, size_t count) {
  double start = now_s();
  vector a = data[0], b = data[1], c = data[2], d = data[3];
  for (size_t i = 0; i + 4 <= count; i += 4) {
    a += data[i];
    b += data[i + 1];
    c += data[i + 2];
    d += data[i + 3];
  }
  double seconds = now_s() - start;
  a += b + c + d;
  if (a[0] == 42.0f) puts("");
  return (double)(count * sizeof(vector)) / seconds;
}

int main(void) {
  const size_t size = (size_t)256 << 20;
  vector *data = aligned_alloc(64, size);
  if (data == NULL) return 1;
  memset(data, 0, size);
  double most_flops = 0, most_bytes = 0;
  for (int i = 0; i < TRIES; ++i) {
    double one = flops();
    double other = bandwidth(data, size / sizeof(vector));
    if (one > most_flops) most_flops = one;
    if (other > most_bytes) most_bytes = other;
  }
  printf("%.6g %.6g\n", most_flops, most_bytes);
  free(data);
  return 0;
}
