#include "worker/server/worker_main.h"

int main(int argc, char** argv) { return heavywater::WorkerMain(argc, argv); }
