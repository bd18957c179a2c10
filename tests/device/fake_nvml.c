/* A libnvidia-ml.so.1 with two cards, any of whose functions fails when it is told to. It says what pynvml asks for. */
#include <stdio.h>
#include <string.h>

static char failing[64];
static int failing_code, failing_card = -1;

void fake_fail(const char *name, int code, int card) {
    snprintf(failing, sizeof failing, "%s", name);
    failing_code = code;
    failing_card = card;
}

static int fails(const char *name, int card) {
    if (strcmp(failing, name) || (failing_card >= 0 && card != failing_card)) return 0;
    return failing_code;
}

/* A card's handle is a pointer to its number. */
static int cards[2] = {0, 1};
#define CARD(handle) (*(int *)(handle))
#define ANSWER(name, parameters, card, answer)                                                                         \
    int name parameters {                                                                                              \
        int code = fails(#name, card);                                                                                 \
        if (code) return code;                                                                                         \
        answer;                                                                                                        \
        return 0;                                                                                                      \
    }

struct memory { unsigned long long total, free, used; };
struct rates { unsigned int gpu, memory; };

ANSWER(nvmlInit_v2, (void), -1, )
ANSWER(nvmlInitWithFlags, (unsigned int flags), -1, )
ANSWER(nvmlShutdown, (void), -1, )
ANSWER(nvmlSystemGetDriverVersion, (char *text, unsigned int size), -1, snprintf(text, size, "600.00"))
ANSWER(nvmlDeviceGetCount_v2, (unsigned int *count), -1, *count = 2)
ANSWER(nvmlDeviceGetHandleByIndex_v2, (unsigned int index, void **card), (int)index, *card = &cards[index])
ANSWER(nvmlDeviceGetHandleByUUID, (const char *uuid, void **card), uuid[4] - '0', *card = &cards[uuid[4] - '0'])
ANSWER(nvmlDeviceGetMemoryInfo, (void *card, struct memory *found), CARD(card),
       found->total = 80ULL << 30; found->used = 1ULL << 30; found->free = 79ULL << 30)
ANSWER(nvmlDeviceGetIndex, (void *card, unsigned int *index), CARD(card), *index = CARD(card))
ANSWER(nvmlDeviceGetName, (void *card, char *text, unsigned int size), CARD(card), snprintf(text, size, "fake"))
ANSWER(nvmlDeviceGetUUID, (void *card, char *text, unsigned int size), CARD(card),
       snprintf(text, size, "GPU-%d", CARD(card)))
ANSWER(nvmlDeviceGetPowerUsage, (void *card, unsigned int *milliwatts), CARD(card), *milliwatts = 300000)
ANSWER(nvmlDeviceGetUtilizationRates, (void *card, struct rates *found), CARD(card), found->gpu = 50)
ANSWER(nvmlDeviceGetTemperature, (void *card, int sensor, unsigned int *found), CARD(card), *found = 60)
ANSWER(nvmlDeviceGetComputeRunningProcesses_v3, (void *card, unsigned int *count, void *rows), CARD(card), *count = 0)
