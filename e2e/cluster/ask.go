// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Flow is a protocol, udp or tcp, and a destination.
type Flow struct {
	Protocol string
	To       netip.AddrPort
}

// String returns the flow as an argument of the program pod.
func (f Flow) String() string { return f.Protocol + ":" + f.To.String() }

// Seen is what the receiver saw of a flow.
type Seen struct {
	// By is the receiver's name.
	By string
	// Source is the source address of the flow.
	Source netip.Addr
	// Failure is the reason for a missing answer, else empty.
	Failure string
}

// Sender runs the program pod and returns its standard output.
type Sender func(ctx context.Context, args ...string) (string, error)

// FromPod sends from a pod in the namespace default.
func (c *Cluster) FromPod(name string) Sender {
	return func(ctx context.Context, args ...string) (string, error) {
		return c.Kubectl(ctx, append([]string{"exec", name, "--", "/pod"}, args...)...)
	}
}

// FromHost sends from a host outside the cluster.
func (c *Cluster) FromHost(host *topology.Host) Sender {
	return func(ctx context.Context, args ...string) (string, error) {
		output, err := host.Command(ctx, filepath.Join(c.directory, "pod"), args...).Output()
		return string(output), err
	}
}

// Ask sends each flow once and returns what the receivers saw.
func (s Sender) Ask(ctx context.Context, flows ...Flow) (map[Flow]Seen, error) {
	args := []string{"ask"}
	for _, f := range flows {
		args = append(args, f.String())
	}
	output, err := s(ctx, args...)
	if err != nil {
		return nil, fmt.Errorf("ask: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(output), "\n")
	if len(lines) != len(flows) {
		return nil, fmt.Errorf("ask: %d answers for %d flows: %s", len(lines), len(flows), output)
	}
	seen := map[Flow]Seen{}
	for i, f := range flows {
		by, rest, _ := strings.Cut(strings.TrimPrefix(lines[i], f.String()+" "), " ")
		if by == "-" {
			seen[f] = Seen{Failure: rest}
			continue
		}
		source, err := netip.ParseAddrPort(rest)
		if err != nil {
			return nil, fmt.Errorf("ask: understand %q: %w", lines[i], err)
		}
		seen[f] = Seen{By: by, Source: source.Addr().Unmap()}
	}
	return seen, nil
}
