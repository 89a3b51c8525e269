// Control words for the device, and a delay. Words travel as kernel arguments, never through the copy engine: there
// they would wait behind every record that was enqueued before them.

#define MAX_WORDS 960

struct WordList {
    int* out;
    int count;
    int words[MAX_WORDS];
};

extern "C" __global__ void write_words(const __grid_constant__ WordList list) {
    for (int i = threadIdx.x; i < list.count; i += blockDim.x) list.out[i] = list.words[i];
}

struct Delay {
    unsigned long long ns;
};

// Keeps its stream busy for a while: the test switch that slows copies down, and tests of stream order.
extern "C" __global__ void spin(const Delay delay) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < delay.ns);
}
