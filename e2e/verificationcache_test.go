// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/pkg/cniplugin"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter"
	nodeaddresses "github.com/ip-masq/ip-masq-cni/pkg/netfilter/addresses"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/iptables"
	"github.com/ip-masq/ip-masq-cni/pkg/netfilter/nftables"
	"github.com/ip-masq/ip-masq-cni/pkg/policy"
	"github.com/ip-masq/ip-masq-cni/pkg/store"
)

// inProcessPlugin runs verbs of the plugin in this process, with a new Plugin for each call, as
// each call of a runtime is a process.
type inProcessPlugin struct {
	node    *node
	program string
	version string
	noCache bool // read the rules always
	// Hooks right before and right after the plugin reads the rules.
	before, after func()
}

// call runs a verb on the node's network and reports whether it read the rules.
func (l inProcessPlugin) call(t *testing.T, conf string, verb func(skel.CNIFuncs, *skel.CmdArgs) error) (read bool) {
	t.Helper()
	nft := nftables.New()
	var warnings bytes.Buffer
	drivers := netfilter.Drivers{iptables.New(l.node.path), nft}
	for i, d := range drivers {
		drivers[i] = observingDriver{d, l, &read}
	}
	p := cniplugin.Plugin{
		Drivers: drivers, Program: cmp.Or(l.program, "v"), Version: l.version, Generation: nft.Generation, PluginFile: "/etc/ip-masq/plugin.toml",
		Addresses: nodeaddresses.Read, LockWait: time.Second, Stdout: io.Discard, Stderr: &warnings,
	}
	if l.noCache {
		p.Generation = nil
	}
	args := skel.CmdArgs{ContainerID: "container", Netns: "/run/netns/container", IfName: "eth0", StdinData: []byte(conf)}
	if err := verb(p.Funcs(), &args); err != nil {
		t.Fatalf("%v\n%s", err, warnings.String())
	}
	must(t, nft.Close())
	return read
}

// add runs ADD on the node and verifies the result with CHECK.
func (l inProcessPlugin) add(t *testing.T, conf string) (read bool) {
	t.Helper()
	return l.checked(t, conf, func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Add(args) })
}

func (l inProcessPlugin) checked(t *testing.T, conf string, verb func(skel.CNIFuncs, *skel.CmdArgs) error) (read bool) {
	t.Helper()
	if err := l.node.Node.Do(func() error {
		read = l.call(t, conf, verb)
		l.call(t, conf, func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Check(args) })
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return read
}

// observingDriver is a driver that records its use.
type observingDriver struct {
	netfilter.Driver
	inProcessPlugin
	used *bool
}

func (l observingDriver) Open(c netfilter.Choice) (netfilter.Backend, error) {
	*l.used = true
	b, err := l.Driver.Open(c)
	return hookedBackend{b, l.inProcessPlugin}, err
}

// hookedBackend is a backend that calls the plugin's hooks around Observe.
type hookedBackend struct {
	netfilter.Backend
	inProcessPlugin
}

func (w hookedBackend) Observe(ctx context.Context, chains []policy.ChainFamily) (netfilter.Observation, error) {
	if w.before != nil {
		w.before()
	}
	if w.after != nil {
		defer w.after()
	}
	return w.Backend.Observe(ctx, chains)
}

// verifiedNode is a node of one network whose ADDs use the verification cache.
type verifiedNode struct {
	inProcessPlugin
	random *rand.Rand
	cidrs  []string
	extra  object // keys of the entry that ip-masq ignores
	count  int
}

// event is something that happens between two ADDs.
type event struct {
	name string
	// happen causes the event.
	happen func(t *testing.T, s *verifiedNode)
	kind
}

// kind is the set of verbs that must read the rules after an event.
type kind int

const (
	harmless kind = iota // none
	entries              // ADD, the only verb that uses the entry
	unread               // ADD; DEL keeps or restores the policy in force
	changes              // each
)

func events() []event {
	return []event{
		{"nothing", func(*testing.T, *verifiedNode) {}, harmless},
		{"another pod", func(_ *testing.T, s *verifiedNode) {
			s.extra = object{"runtimeConfig": object{"n": s.count}, "args": object{"cni": object{"n": s.count}}}
		}, harmless},
		{"ADD of another network", func(t *testing.T, s *verifiedNode) { s.add(t, s.other(t)) }, harmless},
		{"a third-party table", func(t *testing.T, s *verifiedNode) {
			s.node.feed(t, fmt.Sprintf("add table ip thirdparty%d\n", s.count), "nft", "-f", "-")
		}, changes},
		{"the jump is deleted", func(t *testing.T, s *verifiedNode) {
			s.node.alter(t, "-F POSTROUTING", "flush chain ip ip-masq postrouting\n")
		}, changes},
		{"a third party's rule in the chain", func(t *testing.T, s *verifiedNode) {
			s.node.alter(t, "-I IP-MASQ-AGENT -p tcp --dport 25 -j ACCEPT", "insert rule ip ip-masq masq-IP-MASQ-AGENT tcp dport 25 accept\n")
		}, changes},
		{"the owned rules are removed", func(t *testing.T, s *verifiedNode) {
			s.node.alter(t, "-F POSTROUTING\n-F IP-MASQ-AGENT\n-X IP-MASQ-AGENT", "delete table ip ip-masq\n")
		}, changes},
		{"the entry changes", func(_ *testing.T, s *verifiedNode) {
			s.cidrs = []string{fmt.Sprintf("10.%d.0.0/16", s.count%256), fmt.Sprintf("172.16.%d.0/24", s.random.IntN(256))}
		}, entries},
		{"the agent files change", func(t *testing.T, s *verifiedNode) {
			s.node.storeSource(t, agentFilesSource(func(p *policy.SourcePolicy) {
				p.NonMasqueradeCIDRs = prefixes(fmt.Sprintf("192.0.%d.0/24", s.count%256))
			}))
		}, changes},
		{"the document is removed", func(t *testing.T, s *verifiedNode) { must(t, os.Remove(s.node.document(t, "podnet"))) }, unread},
		{"the record is removed", func(t *testing.T, s *verifiedNode) { must(t, os.Remove(filepath.Join(s.node.dataDir, "record.json"))) }, unread},
		{"the document is writable by every user", func(t *testing.T, s *verifiedNode) { must(t, os.Chmod(s.node.document(t, "podnet"), 0o666)) }, unread},
		{"the cache is writable by other users", func(t *testing.T, s *verifiedNode) { must(t, os.Chmod(s.cacheFile(t, "podnet"), 0o666)) }, changes},
		{"the cache is truncated", func(t *testing.T, s *verifiedNode) {
			path := s.cacheFile(t, "podnet")
			text := readFile(t, path)
			must(t, os.WriteFile(path, text[:s.random.IntN(len(text))], 0o600))
		}, changes},
		{"the cache of another network", func(t *testing.T, s *verifiedNode) {
			must(t, os.WriteFile(s.cacheFile(t, "podnet"), readFile(t, s.cacheFile(t, "othernet")), 0o600))
		}, entries},
		{"another version of the program", func(_ *testing.T, s *verifiedNode) { s.program = fmt.Sprint("v", s.count) }, changes},
	}
}

func (s *verifiedNode) conf(t *testing.T) string {
	t.Helper()
	keys := object{"nonMasqueradeCIDRs": s.cidrs}
	for key, value := range s.extra {
		keys[key] = value
	}
	return s.node.conf(t, "podnet", keys)
}

// other returns the entry of a second network with its own chain.
func (s *verifiedNode) other(t *testing.T) string {
	t.Helper()
	return s.node.conf(t, "othernet", object{"masqChain": "OTHER", "nonMasqueradeCIDRs": []string{"10.7.0.0/16"}})
}

// cacheFile returns the path of a network's verification cache, which may not exist.
func (s *verifiedNode) cacheFile(t *testing.T, network string) string {
	t.Helper()
	return strings.TrimSuffix(s.node.document(t, network), ".json") + ".verified"
}

// TestVerificationCache causes events at random and runs ADD or DEL after each. It checks that they
// read the rules unless the event was harmless, and that CHECK, which always reads the rules, finds
// no difference. iptables-legacy has no generation, so each verb reads the rules.
func TestVerificationCache(t *testing.T) {
	const times = 120
	onEveryBackend(t, func(t *testing.T, n *node) {
		t.Logf("-seed %d", *seed)
		s := &verifiedNode{inProcessPlugin: inProcessPlugin{node: n}, random: rand.New(rand.NewPCG(*seed, 0)), cidrs: []string{"10.0.0.0/8"},
			extra: object{"runtimeConfig": object{}, "args": object{}}}
		legacy := n.backend.variant == "legacy"
		expect := func(what string, read, want bool) {
			t.Helper()
			if want = want || legacy; read != want {
				t.Errorf("%d, %s: read the rules: %t, want %t", s.count, what, read, want)
			}
		}
		// The first ADD repairs, the second verifies, the third uses the verification cache.
		warmUp := func() {
			t.Helper()
			for range 2 {
				s.add(t, s.other(t))
				s.add(t, s.conf(t))
			}
			// A directory that just changed is listed again, because its timestamp may not show a
			// later change.
			expect("warmed up", s.add(t, s.conf(t)), false)
		}
		s.add(t, s.conf(t))
		warmUp()
		for s.count = range times {
			e := events()[s.random.IntN(len(events()))]
			if legacy && strings.HasPrefix(e.name, "the cache") {
				continue // iptables-legacy has no cache
			}
			e.happen(t, s)
			if e.kind != unread && s.random.IntN(2) == 0 {
				read := s.checked(t, s.conf(t), func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Del(args) })
				expect(e.name+", DEL", read, e.kind == changes)
			}
			expect(e.name+", ADD", s.add(t, s.conf(t)), e.kind != harmless)
			warmUp()
		}
	})
}

// TestVerificationCacheDuringCommit checks that the verification cache of an ADD does not cover a
// commit made while it read the rules or just after.
func TestVerificationCacheDuringCommit(t *testing.T) {
	for _, f := range backends()[:2] {
		for _, when := range []string{"before", "after"} {
			t.Run(f.name+", "+when, func(t *testing.T) {
				n := newNode(t, f)
				l, conf := inProcessPlugin{node: n}, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
				for range 2 {
					l.add(t, conf)
				}
				if l.add(t, conf) {
					t.Fatal("ADD does not use the verification cache")
				}
				n.feed(t, "add table ip thirdparty\n", "nft", "-f", "-")
				spoil := sync.OnceFunc(func() { n.alter(t, "-F POSTROUTING", "flush chain ip ip-masq postrouting\n") })
				meddled := l
				if when == "before" {
					meddled.before = spoil
				} else {
					meddled.after = spoil
				}
				must(t, n.Node.Do(func() error {
					meddled.call(t, conf, func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Add(args) })
					return nil
				}))
				spoil()
				if read := l.add(t, conf); !read && when == "after" {
					t.Error("the next ADD did not read the rules")
				}
			})
		}
	}
}

// TestWithoutNamespaceCookies runs ADD as on kernels before 5.14, which have no SO_NETNS_COOKIE to
// distinguish a network namespace from a later one with the same inode. It checks that ADD uses the
// verification cache only in the initial network namespace, which never ends.
func TestWithoutNamespaceCookies(t *testing.T) {
	for _, f := range backends()[:2] {
		for where, initial := range map[string]bool{"the first namespace": true, "another namespace": false} {
			t.Run(f.name+", "+where, func(t *testing.T) {
				n := newNode(t, f)
				t.Run("ADD", func(t *testing.T) {
					runtime.LockOSThread() // and never unlock it: the thread ends with the test
					disableNamespaceCookies(t)
					if initial {
						must(t, n.Node.Do(simulateInitialNamespace))
					}
					l, conf := inProcessPlugin{node: n}, n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
					for range 2 {
						l.add(t, conf)
					}
					if looked := l.add(t, conf); looked == initial {
						t.Errorf("ADD without changes: read the rules: %t", looked)
					}
					n.alter(t, "-F POSTROUTING", "flush chain ip ip-masq postrouting\n")
					if !l.add(t, conf) { // which repairs the jump
						t.Error("the next ADD did not read the rules")
					}
				})
			})
		}
	}
}

// disableNamespaceCookies makes getsockopt(SO_NETNS_COOKIE) fail for the calling thread, as on an
// older kernel.
func disableNamespaceCookies(t *testing.T) {
	t.Helper()
	listener, err := missing{cookies: true}.install()
	must(t, errors.Join(err, unix.Close(listener)))
	s := assert.Must(unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))(t)
	defer unix.Close(s)
	if _, err := unix.GetsockoptUint64(s, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE); !errors.Is(err, unix.ENOPROTOOPT) {
		t.Fatalf("SO_NETNS_COOKIE: %v", err)
	}
}

// simulateInitialNamespace gives the calling thread a /proc/sys/net/core that only the initial
// network namespace has.
func simulateInitialNamespace() error {
	const dir = "/proc/sys/net/core"
	return errors.Join(
		unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS),
		unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
		unix.Mount("tmpfs", dir, "tmpfs", 0, ""),
		os.WriteFile(filepath.Join(dir, "dev_weight"), []byte("64\n"), 0o644),
	)
}

// published waits until the reconciler has published that the rules are right at the present generation, and returns
// what it wrote.
func (n *node) published(t *testing.T, d *daemon) (c store.VerificationCache) {
	t.Helper()
	d.until(t, "published verification", func() bool {
		c = store.Open(n.dataDir).Published()
		return strings.HasSuffix(c.Generation, fmt.Sprint(".", n.generation(t)))
	})
	return c
}

// TestPublishedVerification: after another program's commit, an ADD beside a reconciler reads no rules, and one that
// cannot rely on it does.
func TestPublishedVerification(t *testing.T) {
	onEveryBackend(t, func(t *testing.T, n *node) {
		conf := n.conf(t, "podnet", object{"nonMasqueradeCIDRs": []string{"10.0.0.0/8"}})
		n.addAndCheck(t, conf)
		d := n.startReconciler(t).untilReady(t)
		dir := store.Open(n.dataDir)
		stdout, _, _ := n.reconciler(t, "version")
		fields := strings.Fields(stdout)
		l := inProcessPlugin{node: n, version: fields[1]}
		l.add(t, conf)
		commit := func() { n.tool(t, "nft", "add table ip other; delete table ip other") }
		if n.backend.variant == "legacy" {
			commit()
			d.signal(t, syscall.SIGHUP)
			if got := dir.Published(); got != (store.VerificationCache{}) || !l.add(t, conf) {
				t.Errorf("published: %+v", got)
			}
			return
		}
		del := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Del(args) }
		check := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Check(args) }
		status := func(f skel.CNIFuncs, args *skel.CmdArgs) error { return f.Status(args) }
		commit()
		c := n.published(t, d)
		if l.add(t, conf) || l.checked(t, conf, del) || l.add(t, conf) {
			t.Error("reads rules beside a reconciler that verified them")
		}
		if !l.checked(t, conf, check) || !l.checked(t, conf, status) {
			t.Error("CHECK or STATUS reads no rules")
		}
		files := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*")))(t)
		path := files[slices.IndexFunc(files, func(f string) bool { return strings.HasPrefix(string(readFile(t, f)), c.Entry+" ") })]
		text := readFile(t, path)
		d.signal(t, syscall.SIGSTOP)
		other := func(change func(*store.VerificationCache)) func() {
			return func() {
				changed := c
				change(&changed)
				must(t, dir.Publish(changed))
			}
		}
		number := c.Generation[strings.LastIndex(c.Generation, "."):]
		for name, spoil := range map[string]func(){
			"torn":              func() { must(t, os.WriteFile(path, text[:len(text)-3], 0o600)) },
			"empty":             func() { must(t, os.WriteFile(path, nil, 0o600)) },
			"gone":              func() { must(t, os.Remove(path)) },
			"writable":          func() { must(t, os.Chmod(path, 0o666)) },
			"other version":     other(func(c *store.VerificationCache) { c.Entry += "x" }),
			"other documents":   other(func(c *store.VerificationCache) { c.Inputs = c.Inputs[1:] + c.Inputs[:1] }),
			"other namespace":   other(func(c *store.VerificationCache) { c.Generation = "99.0" + number }),
			"earlier":           func() { commit() },
			"other addresses":   other(func(c *store.VerificationCache) { c.Addresses = "192.0.2.0/24=0" }),
			"other plugin.toml": other(func(c *store.VerificationCache) { c.Inputs = store.Digest("x") }),
		} {
			must(t, os.RemoveAll(path))
			must(t, dir.Publish(c))
			n.removeCaches(t, path)
			spoil()
			if !l.add(t, conf) {
				t.Errorf("%s: reads no rules", name)
			}
		}
		// While the reconciler is stopped, rules are changed and the former state is written again.
		n.removeCaches(t, path)
		must(t, dir.Publish(c))
		n.alter(t, "-D IP-MASQ-AGENT 1", "delete element ip ip-masq exempt-IP-MASQ-AGENT { 169.254.0.0/16 }")
		if !l.add(t, conf) { // which ends with CHECK
			t.Error("reads no rules after they were changed")
		}
		d.signal(t, syscall.SIGCONT)
		commit()
		c = n.published(t, d)

		// A changed document, which the reconciler has not seen.
		d.signal(t, syscall.SIGSTOP)
		n.storeSource(t, policy.Source{ID: networkID("other"), Order: 9, Policy: policy.SourcePolicy{Chain: policy.DefaultChain, NonMasqueradeCIDRs: prefixes("20.0.0.0/8")}})
		if !l.add(t, conf) {
			t.Error("reads no rules after a document was changed")
		}
		d.signal(t, syscall.SIGCONT)

		// One on standby publishes nothing.
		n.published(t, d)
		standby := n.startReconciler(t)
		d.signal(t, syscall.SIGSTOP)
		before := dir.Published()
		commit()
		standby.until(t, "standby", func() bool { return strings.Contains(standby.log(), "standby") })
		if now := dir.Published(); now != before {
			t.Errorf("on standby: %+v, was %+v", now, before)
		}
		d.signal(t, syscall.SIGCONT)
	})
}

// removeCaches removes what ADDs verified.
func (n *node) removeCaches(t *testing.T, published string) {
	t.Helper()
	all := assert.Must(filepath.Glob(filepath.Join(n.dataDir, "sources", "*.verified")))(t)
	for _, file := range all {
		if file != published {
			text := strings.Fields(string(readFile(t, file)))
			text[2] = "0.0.0" // another generation, of the same entry and documents
			must(t, os.WriteFile(file, []byte(strings.Join(text, " ")+"\n"), 0o600))
		}
	}
}
