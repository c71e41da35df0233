// SPDX-License-Identifier: Apache-2.0

package cniplugin_test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/plugins/pkg/testutils"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/netfiltertest"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

type object map[string]any

// host is a node with a packet filter in memory, on which the verbs run in this process.
type host struct {
	*testing.T
	kernel  *netfiltertest.Kernel
	effects []string // of the kernel
	dataDir string
	confDir string
	file    string // plugin.toml
}

func newHost(t *testing.T) *host {
	dir := t.TempDir()
	h := &host{
		T:       t,
		kernel:  netfiltertest.New(),
		dataDir: dir + "/data",
		confDir: dir + "/net.d",
		file:    dir + "/plugin.toml",
	}
	h.kernel.Before = func(effect string, _ bool) error {
		h.effects = append(h.effects, effect)
		return nil
	}
	return h
}

// call is a call of a verb. The zero values are those of an ordinary call.
type call struct {
	verb string
	id   string // of the container
	args string // CNI_ARGS
	conf string // on stdin
}

// answer is the outcome of a call.
type answer struct {
	*testing.T
	verb     string
	stdout   []byte
	code     uint // 0 without an error
	msg      string
	warnings string
}

// run runs a subtest on the host.
func (h *host) run(name string, test func(*testing.T)) {
	parent := h.T
	defer func() { h.T = parent }()
	parent.Run(name, func(t *testing.T) {
		h.T = t
		test(t)
	})
}

// conf returns the entry of a network as a runtime passes it to the plugin. Keys with nil are left out.
func (h *host) conf(network string, keys object) string {
	entry := object{
		"cniVersion": "1.1.0", "name": network, "type": "ip-masq", "dataDir": h.dataDir,
		"prevResult": resultWith("10.1.0.2/16"),
	}
	maps.Copy(entry, keys)
	maps.DeleteFunc(entry, func(_ string, value any) bool { return value == nil })
	return string(assert.Must(json.Marshal(entry))(h))
}

// resultWith returns the result of the plugin before, with the address of the pod.
func resultWith(address string) object {
	return object{
		"cniVersion": "1.1.0",
		"interfaces": []object{{"name": "eth0", "sandbox": "/run/netns/container"}},
		"ips":        []object{{"address": address, "interface": 0}},
	}
}

// call runs a verb as the reference plugins run theirs in their tests.
func (h *host) call(c call) answer {
	h.Helper()
	id := cmp.Or(c.id, "container")
	args := &skel.CmdArgs{
		ContainerID: id, Netns: "/run/netns/" + id, IfName: "eth0", Args: c.args, StdinData: []byte(c.conf),
	}
	var stdout, stderr bytes.Buffer
	var err error
	switch c.verb {
	case "ADD":
		var out []byte
		_, out, err = testutils.CmdAddWithArgs(args, func() error {
			p := h.plugin(&stderr)
			p.Stdout = os.Stdout // which CmdAdd reads
			return p.Funcs().Add(args)
		})
		stdout.Write(out)
	case "CHECK":
		err = testutils.CmdCheckWithArgs(args, func() error { return h.plugin(&stderr).Funcs().Check(args) })
	case "DEL":
		err = testutils.CmdDelWithArgs(args, func() error { return h.plugin(&stderr).Funcs().Del(args) })
	case "STATUS":
		err = testutils.CmdStatus(func() error { return h.plugin(&stderr).Funcs().Status(args) })
	case "GC": // testutils has no function for it
		err = h.plugin(&stderr).Funcs().GC(args)
	default:
		h.Fatalf("no verb %s", c.verb)
	}
	a := answer{T: h.T, verb: c.verb, stdout: stdout.Bytes(), warnings: stderr.String()}
	if err != nil {
		failure, is := errors.AsType[*types.Error](err)
		if !is {
			h.Fatalf("%s: %T is no error of the CNI protocol: %v", c.verb, err, err)
		}
		a.code, a.msg = failure.Code, failure.Msg
	}
	return a
}

func (h *host) plugin(stderr *bytes.Buffer) *cniplugin.Plugin {
	return &cniplugin.Plugin{
		Drivers: h.kernel.Drivers(), Program: "program", Version: "v1",
		Generation: func() (netfilter.Generation, error) { return h.kernel.Generation, nil },
		PluginFile: h.file, LockWait: 100 * time.Millisecond, Stderr: stderr,
	}
}

// want fails the test unless the answer has the code, and the error or, without one, the warnings have all of
// the parts.
func (a answer) want(code uint, parts ...string) answer {
	a.Helper()
	if a.code != code {
		a.Fatalf("%s answers %d: %s\nwant %d; stderr:\n%s", a.verb, a.code, a.msg, code, a.warnings)
	}
	text := a.msg
	if code == 0 {
		text = a.warnings
	}
	assert.Contains(a, a.verb, text, parts...)
	return a
}

// clean fails the test if the verb warned.
func (a answer) clean() answer {
	a.Helper()
	if a.warnings != "" {
		a.Errorf("%s warns: %s", a.verb, a.warnings)
	}
	return a
}

// add runs ADD, which has to pass without a warning.
func (h *host) add(network string, keys object) {
	h.Helper()
	h.call(call{verb: "ADD", conf: h.conf(network, keys)}).want(0).clean()
}

func (h *host) store() *store.Dir { return store.Open(h.dataDir) }

func (h *host) wantAttachments(network string, want int) {
	h.Helper()
	count, _, err := h.store().Attachments(network)
	assert.NoError(h, err)
	assert.Equal(h, "attachments of "+network, count, want)
}

// chains returns the names of the chains in the kernel.
func (h *host) chains() []string {
	var names []string
	for choice := range h.kernel.Chains {
		for _, ref := range h.kernel.Refs(choice) {
			names = append(names, ref.Chain)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// stored returns the document of a network.
func (h *host) stored(network string) *policy.Source {
	h.Helper()
	state := assert.Must(h.store().Load())(h)
	return state.Find(policy.SourceID{Kind: policy.Network, Name: network})
}

// snapshot returns the files of the dataDir with their contents, and the generation of the ruleset.
func (h *host) snapshot() string {
	h.Helper()
	var b strings.Builder
	err := filepath.Walk(h.dataDir, func(path string, info os.FileInfo, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		var data []byte
		if info.Mode().IsRegular() {
			data, err = os.ReadFile(path)
		}
		fmt.Fprintf(&b, "%s %s\n%s\n", path, info.Mode(), data)
		return err
	})
	assert.NoError(h, err)
	return fmt.Sprintf("generation %d\n%s", h.kernel.Generation.Number, &b)
}
