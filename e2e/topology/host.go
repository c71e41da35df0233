// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
)

// netnsDir is the directory in which iproute2, cnitool and nsenter look for named network
// namespaces.
const netnsDir = "/run/netns"

// Host is a network namespace that acts as a machine on the network.
type Host struct {
	// Name is unique in its topology.
	Name string
	// Path is the path of the network namespace, for nsenter and CNI. It is unique in the process.
	Path string
	// Addrs are the addresses that the topology assigned, IPv4 first, without those of CNI plugins.
	Addrs []netip.Addr
	// Netlink manages its links, addresses, routes and rules.
	Netlink *netlink.Handle

	handle netns.NsHandle
	thread *thread
	// enclosed is whether Enclose has moved the thread to another pid namespace.
	enclosed atomic.Bool
	observer *observer
	// router is the node whose connection tracking table has the flows of this host; a node is its
	// own router.
	router *Host
	// port counts source ports, so that each flow is a new one.
	port  atomic.Uint32
	close func() error
}

// newHost makes a network namespace with the loopback interface up and mounts it at a path that
// ends in name and suffix.
func newHost(t T, name, suffix string, watched *observer) *Host {
	h := buildHost(t, name, suffix, watched, func() error { return unix.Unshare(unix.CLONE_NEWNET) })
	h.configure(t)
	return h
}

// adoptHost is newHost for an existing network namespace, which it does not change.
func adoptHost(t T, name, suffix string, watched *observer, path string) *Host {
	return buildHost(t, name, suffix, watched, func() error {
		theirs, err := netns.GetFromPath(path)
		if err != nil {
			return fmt.Errorf("open network namespace %s: %w", path, err)
		}
		defer func() { _ = theirs.Close() }()
		return netns.Set(theirs)
	})
}

func buildHost(t T, name, suffix string, watched *observer, enter func() error) *Host {
	h := &Host{
		Name:     name,
		Path:     filepath.Join(netnsDir, name+"-"+suffix),
		handle:   netns.None(),
		observer: watched,
	}
	h.close = sync.OnceValue(h.dismantle)
	t.Cleanup(func() { assert.NoError(t, h.Close()) })
	h.hold(t, enter)
	return h
}

// hold starts the host's thread in the network namespace that enter selects, and mounts that
// namespace.
func (h *Host) hold(t T, enter func() error) {
	assert.NoError(t, os.MkdirAll(netnsDir, 0o755))
	mountPoint := assert.Must(os.OpenFile(h.Path, os.O_CREATE|os.O_EXCL, 0o444))(t)
	assert.NoError(t, mountPoint.Close())
	h.thread = assert.Must(startThread(func() error {
		if err := enter(); err != nil {
			return err
		}
		if err := unix.Mount("/proc/thread-self/ns/net", h.Path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount network namespace: %w", err)
		}
		var err error
		h.handle, err = netns.Get()
		return err
	}))(t)
	h.Netlink = assert.Must(netlink.NewHandleAt(h.handle, unix.NETLINK_ROUTE))(t)
}

// configure sets kernel parameters that would otherwise depend on the machine: new network
// namespaces copy the IPv4 parameters.
func (h *Host) configure(t T) {
	for _, conf := range []string{"all", "default"} {
		for _, setting := range [][2]string{
			{"net/ipv4/conf/" + conf + "/rp_filter", "0"},
			{"net/ipv4/conf/" + conf + "/forwarding", "0"},
			{"net/ipv6/conf/" + conf + "/disable_ipv6", "0"},
			{"net/ipv6/conf/" + conf + "/accept_dad", "0"},
			{"net/ipv6/conf/" + conf + "/router_solicitations", "0"},
		} {
			assert.NoError(t, h.Sysctl(setting[0], setting[1]))
		}
	}
	assert.NoError(t, h.Netlink.LinkSetUp(assert.Must(h.Netlink.LinkByName("lo"))(t)))
}

// Do runs f on the calling goroutine with its thread in the host's network namespace. Goroutines
// that f starts are not in it. Do may be nested, and f may panic or end the goroutine
// (testing.T.Fatal).
func (h *Host) Do(f func() error) error {
	runtime.LockOSThread()
	unlock := true
	defer func() {
		if unlock {
			runtime.UnlockOSThread()
		}
	}()
	before, err := netns.Get()
	if err != nil {
		return fmt.Errorf("open current network namespace: %w", err)
	}
	defer func() { _ = before.Close() }()
	if err := netns.Set(h.handle); err != nil {
		return fmt.Errorf("enter host %s: %w", h.Name, err)
	}
	defer func() {
		if err := netns.Set(before); err != nil {
			// The thread stays locked and ends with the goroutine.
			unlock = false
			panic(fmt.Sprintf("leave host %s: %v", h.Name, err))
		}
	}()
	return f()
}

// Sysctl sets a kernel parameter of the host, by its path below /proc/sys:
// "net/ipv4/ip_forward".
func (h *Host) Sysctl(path, value string) error {
	return h.Do(func() error {
		if err := os.WriteFile("/proc/sys/"+path, []byte(value), 0); err != nil {
			return fmt.Errorf("set sysctl on %s: %w", h.Name, err)
		}
		return nil
	})
}

// Has reports whether the topology gave the host this address.
func (h *Host) Has(address netip.Addr) bool {
	return slices.Contains(h.Addrs, address)
}

// FlushConntrack deletes every connection that the host tracks, so that the next packet of each
// flow is evaluated by the NAT rules.
func (h *Host) FlushConntrack() error {
	handle, err := netlink.NewHandleAt(h.handle, unix.NETLINK_NETFILTER)
	if err != nil {
		return fmt.Errorf("open netfilter socket on %s: %w", h.Name, err)
	}
	defer handle.Close()
	if err := handle.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
		return fmt.Errorf("flush connection tracking on %s: %w", h.Name, err)
	}
	return nil
}

// Close kills the programs started with Command and removes the network namespace. Closing a host
// again does nothing.
func (h *Host) Close() error {
	return h.close()
}

func (h *Host) dismantle() error {
	var errs []error
	if h.Netlink != nil {
		h.Netlink.Close()
	}
	if h.thread != nil {
		h.thread.stop()
	}
	if h.handle.IsOpen() {
		errs = append(errs, unix.Unmount(h.Path, unix.MNT_DETACH), h.handle.Close())
	}
	if err := os.Remove(h.Path); !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close host %s: %w", h.Name, err)
	}
	return nil
}

// HTTPGet gets a URL from the host and returns the status code and the text of the response.
func (h *Host) HTTPGet(ctx context.Context, url string) (status int, text string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, "", err
	}
	dial := func(ctx context.Context, network, address string) (c net.Conn, err error) {
		err = h.Do(func() error {
			c, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return c, err
	}
	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

// thread is an operating system thread that stays in one network namespace. Its child processes get
// the parent death signal when it ends (prctl(2)). Threads that the Go runtime manages cannot
// guarantee that.
type thread struct {
	work chan func()
	done chan struct{}
}

// startThread starts a thread that first calls setUp. If setUp fails, the thread ends and
// startThread returns the error.
func startThread(setUp func() error) (*thread, error) {
	t := &thread{work: make(chan func()), done: make(chan struct{})}
	result := make(chan error)
	go t.run(setUp, result)
	if err := <-result; err != nil {
		<-t.done
		return nil, err
	}
	return t, nil
}

func (t *thread) run(setUp func() error, result chan<- error) {
	// The thread stays locked: it ends when its goroutine returns.
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread must not be used, because /proc/self shows it. While this goroutine
		// occupies it, the new goroutine gets another thread.
		moved := make(chan error)
		go t.run(setUp, moved)
		result <- <-moved
		runtime.UnlockOSThread()
		return
	}
	defer close(t.done)
	err := setUp()
	result <- err
	if err != nil {
		return
	}
	for f := range t.work {
		f()
	}
}

// do runs f on the thread, after earlier calls.
func (t *thread) do(f func() error) error {
	result := make(chan error)
	t.work <- func() { result <- f() }
	return <-result
}

// stop ends the thread.
func (t *thread) stop() {
	close(t.work)
	<-t.done
}
