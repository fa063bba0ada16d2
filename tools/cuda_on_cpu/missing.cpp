// Symbols that candle's libraries are linked with and Ringspan never calls, and a random number generator without function, which
// candle creates for each device.
#include "device.hpp"

extern "C" {

int curandCreateGenerator(void **generator, int) {
    *generator = new int(0);
    return 0;
}

int curandDestroyGenerator(void *generator) {
    delete static_cast<int *>(generator);
    return 0;
}

int curandSetStream(void *, void *) { return 0; }
int curandSetPseudoRandomGeneratorSeed(void *, unsigned long long) { return 0; }

#define MISSING(name)                                                                                                            \
    void name() { fail(#name " is called, which is not there"); }

MISSING(cuCtxDestroy_v2)
MISSING(cuModuleLoad)
MISSING(cuStreamIsCapturing)
MISSING(cublasDgemmStridedBatched)
MISSING(curandGenerateNormal)
MISSING(curandGenerateNormalDouble)
MISSING(curandGenerateUniform)
MISSING(curandGenerateUniformDouble)
}
