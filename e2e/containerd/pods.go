// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Pod is a pod sandbox.
type Pod struct {
	ID   string
	Name string
	// Netns is the path of its network namespace in this process's file system.
	Netns string
	// Addrs are the addresses that CRI reports.
	Addrs []netip.Addr

	runtime *Runtime
	config  string // a path on the machine
}

// RunPod creates a pod sandbox in the namespace "default", or that of NAMESPACE/NAME. The error has the message of CRI, which
// a kubelet would put into the pod's events.
func (r *Runtime) RunPod(ctx context.Context, name string) (*Pod, error) {
	namespace := "default"
	if before, after, found := strings.Cut(name, "/"); found {
		namespace, name = before, after
	}
	config := fmt.Sprintf(`{"metadata": {"name": %q, "namespace": %q, "uid": "%s-%d", "attempt": 0},
		"log_directory": "/var/log/pods/%s", "linux": {"cgroup_parent": %q}}`,
		name, namespace, name, time.Now().UnixNano(), name, r.Machine.Cgroup)
	p := &Pod{Name: name, runtime: r, config: "/run/crictl/" + name + ".json"}
	if err := r.Machine.WriteFile(p.config, config, 0o644); err != nil {
		return nil, fmt.Errorf("run pod %s: %w", name, err)
	}
	id, err := r.ask(ctx, "runp", p.config)
	if err != nil {
		return nil, fmt.Errorf("run pod %s: %w", name, err)
	}
	p.ID = strings.TrimSpace(id)
	return p, p.inspect(ctx)
}

func (p *Pod) inspect(ctx context.Context) error {
	text, err := p.runtime.ask(ctx, "inspectp", "-o", "json", p.ID)
	if err != nil {
		return err
	}
	var inspected struct {
		Status struct {
			Network struct {
				IP            netip.Addr                `json:"ip"`
				AdditionalIps []struct{ IP netip.Addr } `json:"additionalIps"`
			} `json:"network"`
		} `json:"status"`
		Info struct {
			RuntimeSpec struct {
				Linux struct {
					Namespaces []struct{ Type, Path string } `json:"namespaces"`
				} `json:"linux"`
			} `json:"runtimeSpec"`
		} `json:"info"`
	}
	if err := json.Unmarshal([]byte(text), &inspected); err != nil {
		return fmt.Errorf("inspect pod %s: %w: %s", p.Name, err, text)
	}
	p.Addrs = []netip.Addr{inspected.Status.Network.IP}
	for _, additional := range inspected.Status.Network.AdditionalIps {
		p.Addrs = append(p.Addrs, additional.IP)
	}
	for _, namespace := range inspected.Info.RuntimeSpec.Linux.Namespaces {
		if namespace.Type == "network" {
			p.Netns = p.runtime.Machine.Path(namespace.Path)
			return nil
		}
	}
	return fmt.Errorf("inspect pod %s: CRI names no network namespace: %s", p.Name, text)
}

// Stop stops the pod's containers and its sandbox; the runtime calls DEL.
func (p *Pod) Stop(ctx context.Context) error {
	_, err := p.runtime.ask(ctx, "stopp", p.ID)
	return err
}

// Remove removes the pod, stopped or not; the runtime calls DEL again.
func (p *Pod) Remove(ctx context.Context) error {
	_, err := p.runtime.ask(ctx, "rmp", "-f", p.ID)
	return err
}

// Container is a container of a pod.
type Container struct {
	ID string

	pod *Pod
}

// Run starts a container in the pod with arguments for the image's entry point, or with a command
// if the image has none.
func (p *Pod) Run(ctx context.Context, t topology.T, name, image string, args ...string) *Container {
	t.Helper()
	quoted := assert.Must(json.Marshal(args))(t)
	config := fmt.Sprintf(`{"metadata": {"name": %q}, "image": {"image": %q}, "args": %s, "log_path": "%s.log"}`,
		name, image, quoted, name)
	path := fmt.Sprintf("/run/crictl/%s-%s.json", p.Name, name)
	assert.NoError(t, p.runtime.Machine.WriteFile(path, config, 0o644))
	id := assert.Must(p.runtime.ask(ctx, "create", "--no-pull", p.ID, path, p.config))(t)
	c := &Container{ID: strings.TrimSpace(id), pod: p}
	assert.Must(p.runtime.ask(ctx, "start", c.ID))(t)
	return c
}

// Output returns the container's output so far.
func (c *Container) Output(ctx context.Context, t topology.T) string {
	t.Helper()
	answer := assert.Must(c.pod.runtime.Crictl(ctx, "logs", c.ID))(t)
	if answer.ExitCode != 0 {
		t.Fatalf("crictl logs: exit code %d: %s", answer.ExitCode, answer.Stderr)
	}
	return answer.Stdout + answer.Stderr
}

// Await waits until the container has printed this number of lines, and returns them.
func (c *Container) Await(ctx context.Context, t topology.T, lines int) []string {
	t.Helper()
	for {
		text := c.Output(ctx, t)
		if got := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n"); text != "" && len(got) >= lines {
			return got
		}
		select {
		case <-ctx.Done():
			t.Fatalf("wait for %d lines of container %s: %v; output %q", lines, c.ID, ctx.Err(), text)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Destination is a destination of pods, and whether the policy masquerades it.
type Destination struct {
	To          string
	Masqueraded bool
}

// Destinations returns destinations in a topology for the default prefixes with fd00::/8.
func Destinations() []Destination {
	return []Destination{
		{"203.0.113.11:7", true}, {"198.51.100.7:7", true}, {"[2001:db8:113::11]:7", true},
		{"192.168.50.11:7", false}, {"10.200.0.1:7", false}, {"[fd00:50::11]:7", false},
	}
}

// Source returns the source address that the receiver must see of a packet from a pod with these addresses.
func (d Destination) Source(w *topology.Topology, addrs []netip.Addr) netip.Addr {
	to := netip.MustParseAddrPort(d.To).Addr()
	if d.Masqueraded {
		return w.NodeAddr(w.Outside, to)
	}
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is4() == to.Is4() })
	if i < 0 {
		return netip.Addr{}
	}
	return addrs[i]
}

// FirstPackets runs a container that sends one packet to each of the destinations as soon as it starts, and
// compares the source addresses that the receivers see with the policy.
func (p *Pod) FirstPackets(ctx context.Context, t topology.T, w *topology.Topology, to []Destination) {
	t.Helper()
	args := []string{"first"}
	for _, d := range to {
		args = append(args, "udp:"+d.To)
	}
	lines := p.Run(ctx, t, "first", PodImage, args...).Await(ctx, t, len(to))
	for i, d := range to {
		fields := strings.Fields(lines[i]) // flow, receiver, source
		source, err := netip.ParseAddrPort(fields[len(fields)-1])
		if want := d.Source(w, p.Addrs); err != nil || source.Addr() != want {
			t.Errorf("first packet of pod %s: %s, want %s", p.Name, strings.TrimSpace(lines[i]), want)
		}
	}
}
