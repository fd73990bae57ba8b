// Answers a question and shows what stayed on the device:
//
//	generate WORKER CACHE QUESTION
//
// docs/clients.md says how to build it: heavywater/v1 is what protoc makes of proto/heavywater/v1.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	v1 "heavywater/v1"
)

const (
	callTimeout = 30 * time.Second
	attempts    = 30 // to go on with a stream that broke off, a second apart
)

// stream sends one request and hands each response on. It returns the summary, which is nil when the stream ended
// before it.
func stream(worker v1.GenerationServiceClient, request *v1.GenerateRequest,
	take func(*v1.GenerateResponse)) (*v1.GenerateSummary, error) {
	ctx, cancel := context.WithCancel(context.Background()) // frees the device at once when we leave early
	defer cancel()
	responses, err := worker.Generate(ctx, request)
	if err != nil {
		return nil, err
	}
	for {
		response, err := responses.Recv()
		if err == io.EOF {
			return nil, status.Error(codes.Unavailable, "the stream ended without a summary")
		}
		if err != nil {
			return nil, err
		}
		take(response)
		if response.Summary != nil {
			return response.Summary, nil
		}
	}
}

// generate prints each token once. A stream that breaks off after it was accepted goes on where it was, as soon as a
// server is there again.
func generate(worker v1.GenerationServiceClient, request *v1.GenerateRequest) (*v1.GenerateSummary, uint64, error) {
	var received []int32
	var sequence uint64 // 64 bits, as all ids
	take := func(response *v1.GenerateResponse) {
		if response.SequenceId != 0 {
			sequence = response.SequenceId
		}
		if response.Index != nil { // absent in the first message and the last
			received = append(received, response.Token)
			fmt.Print(response.Text)
		}
	}
	for attempt := 0; ; attempt++ {
		summary, err := stream(worker, request, take)
		if err == nil {
			return summary, sequence, nil
		}
		if status.Code(err) != codes.Unavailable || sequence == 0 || attempt == attempts {
			return nil, 0, err
		}
		time.Sleep(time.Second)
		request.Resume = &v1.ResumePoint{
			SequenceId:     sequence,
			FromToken:      int32(len(received)),
			ReceivedTokens: received,
		}
	}
}

// showSets prints which tokens of layer 0 stayed.
func showSets(cache v1.SequenceServiceClient, sequence uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	sets, err := cache.GetSets(ctx, &v1.GetSetsRequest{SequenceId: sequence, Layers: []int32{0}})
	if err != nil {
		return err
	}
	for {
		set, err := sets.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Printf("layer %d: heavy %v, recent %d\n", set.Layer, set.Heavy, len(set.Recent))
	}
}

func run(workerAddress, cacheAddress, question string) error {
	worker, err := grpc.Dial(workerAddress, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer worker.Close()
	cache, err := grpc.Dial(cacheAddress, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer cache.Close()

	summary, sequence, err := generate(v1.NewGenerationServiceClient(worker), &v1.GenerateRequest{
		Messages:     []*v1.ChatMessage{{Role: "user", Content: question}}, // the server knows the model's chat template
		MaxNewTokens: 24,
		Policy:       &v1.PolicyOptions{Policy: "snapkv_h2o", HeavyTokens: 16, RecentTokens: 16},
	})
	if err != nil {
		return err // INVALID_ARGUMENT names the field
	}
	fmt.Printf("\n%s: %d + %d tokens, %d of %d bytes on the device\n", summary.FinishReason, summary.PromptTokens,
		summary.NewTokens, summary.DeviceBytesPeak, summary.FullCacheBytes)

	sequences := v1.NewSequenceServiceClient(cache)
	if err := showSets(sequences, sequence); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callTimeout)
	defer cancel()
	_, err = sequences.Close(ctx, &v1.CloseSequenceRequest{SequenceId: sequence}) // frees its pages; else its lease does
	return err
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "usage: generate WORKER CACHE QUESTION")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
