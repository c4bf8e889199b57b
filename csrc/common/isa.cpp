#include <cstdlib>
#include <cstring>

#include "deepspeed_host.h"

namespace {

int32_t best_isa() {
#if defined(__GNUC__) && defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return avx2 && avx512 ? 2 : avx2 ? 1 : 0;
#else
    return 0;
#endif
}

int32_t initial_isa() {
    const int32_t best = best_isa();
    const char *wanted = std::getenv("DS_NATIVE_ISA");
    if (wanted == nullptr) return best;
    if (std::strcmp(wanted, "plain") == 0) return 0;
    if (std::strcmp(wanted, "avx2") == 0) return best < 1 ? best : 1;
    return best;
}

int32_t current = initial_isa();

}  // namespace

int32_t ds_abi(void) { return DS_HOST_ABI; }

int32_t ds_isa(void) { return current; }

int32_t ds_set_isa(int32_t isa) {
    if (isa >= 0 && isa <= best_isa()) current = isa;
    return current;
}
