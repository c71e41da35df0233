// SPDX-License-Identifier: Apache-2.0

package nfnetlink

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/timelimit"
)

// watched is as the reconciler watches, with the owned chain MASQ in the shared table.
func watched() Watched {
	w := Watched{Tables: []string{"ip-masq", "ip-masq-guard"}, Shared: "nat", Chains: new(atomic.Pointer[[]string])}
	w.Chains.Store(&[]string{"POSTROUTING", "MASQ"})
	return w
}

// listen opens a Listener in the thread's namespace, to be closed at the end.
func listen(t testing.TB) *Listener {
	t.Helper()
	l := assert.Must(Listen(watched()))(t)
	t.Cleanup(func() {
		assert.NoError(t, l.Close())
	})
	return l
}

// next calls Next, which has to return in time.
func next(t testing.TB, l *Listener) (Commit, error) {
	t.Helper()
	assert.NoError(t, l.file.SetReadDeadline(time.Now().Add(timelimit.Wait)))
	return l.Next()
}

// pending is what the socket is charged for what is in its queue, in bytes.
func pending(t testing.TB, l *Listener) (charged, limit uint32) {
	t.Helper()
	var info [9]uint32 // SK_MEMINFO_VARS
	size := uint32(unsafe.Sizeof(info))
	raw := assert.Must(l.file.SyscallConn())(t)
	assert.NoError(t, raw.Control(func(fd uintptr) {
		if _, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, fd, unix.SOL_SOCKET, unix.SO_MEMINFO,
			uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&size)), 0); errno != 0 {
			t.Error(errno)
		}
	}))
	return info[0], info[1]
}

// program runs a program in the thread's namespace and returns its process id.
func program(t testing.TB, stdin string, argv ...string) uint32 {
	t.Helper()
	c := exec.Command(argv[0], argv[1:]...)
	c.Stdin = strings.NewReader(stdin)
	assert.Output(t, c)
	return uint32(c.Process.Pid)
}

func restore(rules int) string {
	var b strings.Builder
	b.WriteString("*nat\n:BULK - [0:0]\n")
	for i := range rules {
		fmt.Fprintf(&b, "-A BULK -d 10.%d.%d.0/24 -m comment --comment \"rule %d\" -j RETURN\n", i>>8, i&255, i)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// TestListenTellsWhoInAContainer: in a PID namespace of its own it tells the same
// names, and pids of the first PID namespace.
func TestListenTellsWhoInAContainer(t *testing.T) {
	c := exec.Command("/proc/self/exe", "-test.run=^TestListenTellsWho$", "-test.v")
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
	if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestListenTellsWho ") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestListenTellsWho(t *testing.T) {
	namespace(t)
	c, l, second := dial(t), listen(t), listen(t)
	// Whether pids here are those that the kernel tells of: the inode is PROC_PID_INIT_INO of the kernel.
	first := assert.Must(os.Readlink("/proc/self/ns/pid"))(t) == "pid:[4026531836]"
	ourselves := func() uint32 {
		var b Batch
		b.AddTable(IPv4, "t")
		commit(t, c, &b)
		return uint32(unix.Gettid())
	}
	observedPIDs := map[uint32]uint32{} // pids as the kernel reports them, by those here
	name := assert.Must(os.ReadFile("/proc/thread-self/comm"))(t)
	for _, tc := range []struct {
		what    string
		program string
		touched bool
		run     func() uint32 // returns who
	}{
		{"ourselves", strings.TrimSpace(string(name)), false, ourselves},
		{"nft", "nft", false, func() uint32 { return program(t, "", "nft", "add table ip6 x") }},
		{"iptables-restore", "iptables-nft-re", true, func() uint32 {
			return program(t, restore(1), "iptables-nft-restore", "--noflush")
		}},
		{"5,000 rules at once", "iptables-nft-re", false, func() uint32 {
			return program(t, restore(5000), "iptables-nft-restore", "--noflush")
		}},
		{"deleting all", "nft", true, func() uint32 { return program(t, "", "nft", "flush ruleset") }},
		{"ourselves again", strings.TrimSpace(string(name)), false, ourselves},
	} {
		pid := tc.run()
		want := Commit{Generation: assert.Must(c.Generation())(t), PID: pid, Program: tc.program, Touched: tc.touched}
		for i, l := range []*Listener{l, second} {
			got, err := next(t, l)
			if !first && err == nil {
				// Which pid that is there cannot be known here: each process has its own.
				if _, known := observedPIDs[pid]; !known && !slices.Contains(slices.Collect(maps.Values(observedPIDs)), got.PID) {
					observedPIDs[pid] = got.PID
				}
				want.PID = observedPIDs[pid]
			}
			if err != nil || got != want {
				t.Errorf("%s: listener %d got %+v, %v; want %+v", tc.what, i, got, err, want)
			}
		}
	}
}

// TestListenHolds commits small and large changes while the Listener does not read.
func TestListenHolds(t *testing.T) {
	namespace(t)
	const commits = 2_000
	c, l := dial(t), listen(t)
	var small, large, gone Batch
	small.AddTable(IPv4, "t")
	small.AddChain(IPv4, "t", "c", nil)
	small.AddSet(IPv4, "t", AddressRanges(IPv4, "s"))
	commit(t, c, &small)
	small = Batch{}
	small.AddRule(IPv4, "t", "c", []Expr{Verdict{Code: Return}}, "")
	ranges := many(IPv4, 300)
	large.AddElements(IPv4, "t", "s", ranges)
	gone.FlushSet(IPv4, "t", "s")
	gone.FlushChain(IPv4, "t", "c")
	for i := range commits {
		switch i % 100 {
		case 0:
			commit(t, c, &large)
		case 50:
			commit(t, c, &gone)
		default:
			commit(t, c, &small)
		}
	}
	charged, limit := pending(t, l)
	t.Logf("%d commits take %d of %d bytes, %d each", commits+1, charged, limit, charged/(commits+1))
	most := limit / 4 * 3
	if runtime.GOARCH == "s390x" { // the kernel aligns to cache lines of 256 bytes
		most = limit / 16 * 15
	}
	if charged > most {
		t.Error("that is almost all")
	}
	last := assert.Must(c.Generation())(t)
	for i := range uint32(commits + 1) {
		if got, err := next(t, l); err != nil || got.Generation != last-commits+i {
			t.Fatalf("commit %d has generation %d, want %d, %v", i, got.Generation, last-commits+i, err)
		}
	}
}

func TestListenTellsOfLosses(t *testing.T) {
	namespace(t)
	c, l := dial(t), listen(t)
	raw := assert.Must(l.file.SyscallConn())(t)
	assert.NoError(t, raw.Control(func(fd uintptr) {
		assert.NoError(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<10))
	}))
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddChain(IPv4, "t", "c", nil)
	commit(t, c, &b)
	b = Batch{}
	b.AddRule(IPv4, "t", "c", []Expr{Verdict{Code: Return}}, "")
	const commits = 1000
	for range commits {
		commit(t, c, &b)
	}
	if _, err := next(t, l); !errors.Is(err, ErrLost) {
		t.Errorf("got error %v", err)
	}
}

// TestListenGap: a commit after one that was missed counts as one that touched what is watched.
func TestListenGap(t *testing.T) {
	namespace(t)
	c, l := dial(t), listen(t)
	var b Batch
	b.AddTable(IPv4, "t")
	b.AddChain(IPv4, "t", "c", nil)
	b.AddRule(IPv4, "t", "c", nil, "")
	for i, missed := range []uint32{0, 1, 0} {
		commit(t, c, &b)
		l.last -= missed
		if got, err := next(t, l); err != nil || got.Touched != (missed > 0) {
			t.Errorf("commit %d: got %+v, %v", i, got, err)
		}
	}
}

func TestListenClose(t *testing.T) {
	namespace(t)
	c, l := dial(t), listen(t)
	done := make(chan error, 1)
	go func() {
		_, err := l.Next()
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("Next returned by itself: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	assert.NoError(t, l.Close())
	select {
	case err := <-done:
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("Next returned %v", err)
		}
	case <-time.After(timelimit.Wait):
		t.Fatal("Next waits after Close")
	}
	var b Batch
	b.AddTable(IPv4, "t")
	commit(t, c, &b)
	if _, err := l.Next(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Next after Close: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Errorf("Close again: %v", err)
	}
}

// TestListenTouched: a commit touches what is watched, or it does not.
func TestListenTouched(t *testing.T) {
	namespace(t)
	const owned = "table ip ip-masq { set s { type ipv4_addr; }; chain c { type nat hook postrouting priority 101; }; }\n"
	const shared = "table ip nat { chain POSTROUTING { type nat hook postrouting priority 100; }; chain MASQ {}; chain OTHER {}; chain KUBE-SVC {}; }\n"
	const foreign = "table ip other { set s { type ipv4_addr; flags timeout; }; chain c {}; counter n {}; }\n"
	many := func(line string) string { return strings.Repeat(line, 300) }
	nft := func(script string) func() { return func() { program(t, "flush ruleset\n"+script, "nft", "-f", "-") } }
	for _, tc := range []struct {
		before, script string
		touched        bool
	}{
		{foreign, "add rule ip other c accept", false},
		{foreign, "add element ip other s { 1.1.1.1 timeout 5s, 2.2.2.2 }", false},
		{foreign, "delete table ip other", false},
		{foreign, "rename chain ip other c masq", false},
		{foreign, many("add rule ip other c ip daddr 1.2.3.4 counter accept\n"), false},
		{foreign, many("add rule ip other c ip daddr 1.2.3.4 counter accept\n") + owned, true},
		{"", owned, true},
		{"", "add table ip6 ip-masq-guard", true},
		{"", "add table inet ip-masq", false},
		{"", "add table ip ip-masq2; add chain ip ip-masq2 c; add rule ip ip-masq2 c accept", false},
		{owned, "add element ip ip-masq s { 1.1.1.1 }", true},
		{owned, "add rule ip ip-masq c accept", true},
		{owned, "add chain ip ip-masq x", true},
		{owned, "rename chain ip ip-masq c d", true},
		{owned, "add chain ip ip-masq c { policy drop; }", true},
		{owned, "add counter ip ip-masq n", true},
		{owned, "add table ip ip-masq { flags dormant; }", true},
		{owned + "add rule ip ip-masq c accept", "flush ruleset", true},
		{owned, foreign + "delete table ip ip-masq\n" + owned, true},
		{owned + foreign, many("add rule ip other c accept\n") + "add rule ip ip-masq c accept\n" + many("add rule ip other c drop\n"), true},
		{owned + foreign + "add element ip ip-masq s { 1.1.1.1 }", "delete element ip ip-masq s { 1.1.1.1 }", true},
		{"", shared, true},
		{shared, "add rule ip nat POSTROUTING accept", true},
		{shared, "add rule ip nat MASQ accept", true},
		{shared, "add rule ip nat OTHER accept", false},
		{shared, "add rule ip nat KUBE-SVC accept", false},
		{shared, many("add rule ip nat KUBE-SVC ip daddr 1.2.3.4 accept\n"), false},
		{shared, many("add rule ip nat KUBE-SVC ip daddr 1.2.3.4 accept\n") + "add rule ip nat MASQ accept", true},
		{shared, "add chain ip nat KUBE-SEP; add rule ip nat KUBE-SVC goto KUBE-SEP", false},
		{shared, "delete chain ip nat MASQ", true},
		{shared, "delete chain ip nat OTHER", false},
		{shared, "rename chain ip nat MASQ OTHER2", true},
		{shared, "rename chain ip nat KUBE-SVC KUBE-SEP", false},
		{shared, "add chain ip nat KUBE-SVC", false},
		{strings.ReplaceAll(shared, "ip", "ip6"), "rename chain ip6 nat MASQ OTHER2", true},
		{shared, "delete chain ip nat MASQ; rename chain ip nat OTHER MASQ", true},
		{shared, "add chain ip nat POSTROUTING { policy drop; }", true},
		{shared, "add table ip nat { flags dormant; }", true},
		{shared, "delete table ip nat", true},
	} {
		nft(tc.before)()
		l := listen(t)
		program(t, tc.script, "nft", "-f", "-")
		now := assert.Must(dial(t).Generation())(t)
		if got, err := next(t, l); err != nil || got.Touched != tc.touched || got.Generation != now {
			t.Errorf("%s\nthen %s:\ngot %+v, %v; want touched %t, generation %d", tc.before, tc.script[:min(len(tc.script), 200)], got, err, tc.touched, now)
		}
	}
}

func TestDecodeCommit(t *testing.T) {
	var w attrWriter
	at := w.beginMessage(messageType(unix.NFT_MSG_NEWGEN), 0, nfgenmsg(0))
	w.u32(unix.NFTA_GEN_ID, 7)
	w.endMessage(at)
	l := Listener{last: 6}
	m, _, _ := cutMessage(w.b)
	if got, err := l.commit(m); err != nil || got != (Commit{Generation: 7}) {
		t.Errorf("without the process: %+v, %v", got, err)
	}
	payload := m.payload
	for n := range payload {
		m.payload = payload[:n]
		if got, err := l.commit(m); err == nil || got != (Commit{}) {
			t.Errorf("of %d bytes: %+v, %v", n, got, err)
		}
	}
}
