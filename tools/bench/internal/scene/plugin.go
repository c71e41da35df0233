// SPDX-License-Identifier: Apache-2.0

package scene

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// Took is the cost of a plugin's run, from before its start to after its end.
type Took struct {
	Wall time.Duration
	CPU  time.Duration // of the plugin and of the programs that it ran
}

// call is a prepared run of a plugin.
type call struct {
	command *topology.Cmd
	output  *os.File
	files   []*os.File
}

// Request is a call of a plugin with the node's entry for a pod.
type Request struct {
	Plugin    string
	Container string
	Verb      string // "" is ADD
	Args      []string
	Env       []string // beside that of CNI
}

// NextPod returns a container ID; the IDs of a full node repeat.
func (n *Node) NextPod() string {
	const full = 250
	n.pods++
	return fmt.Sprintf("%064x", n.pods%full)
}

// Add runs ADD of a plugin for a container.
func (n *Node) Add(plugin, container string) (Took, error) {
	return n.Run(Request{Plugin: plugin, Container: container})
}

// Run runs a plugin and fails if the plugin does.
func (n *Node) Run(r Request) (Took, error) {
	c, err := n.prepare(r)
	if err != nil {
		return Took{}, err
	}
	defer c.close()
	start := time.Now()
	err = c.command.Run()
	return c.took(time.Since(start)), c.explain(err)
}

// RunAtOnce runs all requests concurrently and returns the time until the last has ended.
func (n *Node) RunAtOnce(requests []Request) (time.Duration, error) {
	calls := make([]*call, len(requests))
	for i, r := range requests {
		var err error
		if calls[i], err = n.prepare(r); err != nil {
			return 0, err
		}
		defer calls[i].close()
	}
	start := time.Now()
	for i, c := range calls {
		if err := c.command.Start(); err != nil {
			for _, started := range calls[:i] {
				_ = started.command.Wait() // the error of Start is returned
			}
			return 0, err
		}
	}
	var failure error
	for _, c := range calls {
		if err := c.explain(c.command.Wait()); err != nil {
			failure = err
		}
	}
	return time.Since(start), failure
}

// prepare opens all files before the measurement: with files instead of pipes no goroutine copies
// data.
func (n *Node) prepare(r Request) (*call, error) {
	in, err := os.Open(n.stdin)
	if err != nil {
		return nil, err
	}
	out, err := os.CreateTemp(n.Dir, "output")
	if err != nil {
		return nil, err
	}
	c := &call{command: n.Node.Command(context.Background(), n.Program(r.Plugin), r.Args...), output: out, files: []*os.File{in, out}}
	c.command.Env = append([]string{"PATH=" + n.programs, "CNI_COMMAND=" + cmp.Or(r.Verb, "ADD"), "CNI_CONTAINERID=" + r.Container,
		"CNI_NETNS=" + n.pod.Path, "CNI_IFNAME=eth0", "CNI_PATH=" + n.binaries}, r.Env...)
	c.command.Stdin, c.command.Stdout, c.command.Stderr = in, out, out
	return c, nil
}

// Program returns the path of ip-masq, or of a plugin of the benchmark.
func (n *Node) Program(plugin string) string {
	for _, dir := range []string{"", "bench"} {
		path := filepath.Join(n.binaries, dir, plugin)
		if info, err := os.Stat(path); err == nil && !info.IsDir() {
			return path
		}
	}
	return plugin
}

func (c *call) took(wall time.Duration) Took {
	t := Took{Wall: wall}
	if state := c.command.ProcessState; state != nil {
		t.CPU = state.UserTime() + state.SystemTime()
	}
	return t
}

func (c *call) explain(err error) error {
	if err == nil {
		return nil
	}
	text, _ := os.ReadFile(c.output.Name()) // the error of the plugin is returned
	return fmt.Errorf("%s: %w\n%s", filepath.Base(c.command.Path), err, text)
}

func (c *call) close() {
	for _, f := range c.files {
		_ = f.Close() // the run has ended
	}
	_ = os.Remove(c.output.Name()) // the sandbox removes it otherwise
}
