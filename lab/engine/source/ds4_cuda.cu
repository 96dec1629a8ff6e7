// The one kernel of the stand-in engine: it is compiled for real, so that the build's architecture can be read back.
#ifdef DS4_CUDA_HAVE_MXF4
#define SCALE 4.0f
#else
#define SCALE 1.0f
#endif

extern "C" __global__ void ds4_scale(float *values, float factor) {
    values[blockIdx.x * blockDim.x + threadIdx.x] *= factor * SCALE;
}
