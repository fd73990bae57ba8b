# Answers a question and shows what stayed on the device:
#
#   ruby -I GENERATED generate.rb WORKER CACHE QUESTION
#
# GENERATED is where grpc_tools_ruby_protoc has put heavywater/v1 (docs/clients.md).
require "heavywater/v1/generation_services_pb"
require "heavywater/v1/sequence_services_pb"

V1 = Heavywater::V1

# Yields each token once. A stream that breaks off after it was accepted goes on where it was, as soon as a
# server is there again.
def each_token(stub, request, attempts: 30)
  received = []
  sequence_id = 0
  begin
    stub.generate(request).each do |response|
      sequence_id = response.sequence_id unless response.sequence_id.zero?
      if response.has_index?
        received << response.token
        yield response, sequence_id
      end
      return response.summary, sequence_id if response.summary
    end
  rescue GRPC::Unavailable
    raise if sequence_id.zero? || (attempts -= 1).negative?

    sleep 1
    request.resume = V1::ResumePoint.new(
      sequence_id: sequence_id, from_token: received.size, received_tokens: received
    )
    retry
  end
end

worker_address, cache_address, question = ARGV
abort "usage: generate.rb WORKER CACHE QUESTION" unless question

worker = V1::GenerationService::Stub.new(worker_address, :this_channel_is_insecure)
cache = V1::SequenceService::Stub.new(cache_address, :this_channel_is_insecure)

request = V1::GenerateRequest.new(
  messages: [V1::ChatMessage.new(role: "user", content: question)], # the server knows the model's chat template
  max_new_tokens: 24,
  policy: V1::PolicyOptions.new(policy: "snapkv_h2o", heavy_tokens: 16, recent_tokens: 16)
)
begin
  summary, sequence_id = each_token(worker, request) { |response| print response.text; $stdout.flush }
rescue GRPC::BadStatus => e
  abort "#{e.code}: #{e.details}" # INVALID_ARGUMENT names the field
end
puts
puts "#{summary.finish_reason}: #{summary.prompt_tokens} + #{summary.new_tokens} tokens, " \
     "#{summary.device_bytes_peak} of #{summary.full_cache_bytes} bytes on the device"

cache.get_sets(V1::GetSetsRequest.new(sequence_id: sequence_id, layers: [0])).each do |set|
  puts "layer #{set.layer}: heavy #{set.heavy.to_a.inspect}, recent #{set.recent.size}"
end
cache.close(V1::CloseSequenceRequest.new(sequence_id: sequence_id)) # frees its pages; else its lease does
