%% Runs commands of the scenario with eredis: `escript adapter.erl PORT PASSWORD`.
main([Port, Password]) ->
    io:setopts([{binary, true}]),
    loop(list_to_integer(Port), Password, #{}).

loop(Port, Password, Clients) ->
    case io:get_line("") of
        eof -> ok;
        Line ->
            [Number | Words] = binary:split(string:trim(Line, trailing, "\n"), <<"\t">>, [global]),
            Clients1 = case Clients of
                #{Number := _} -> Clients;
                _ -> {ok, New} = eredis:start_link("127.0.0.1", Port, 0, Password), Clients#{Number => New}
            end,
            Client = maps:get(Number, Clients1),
            case Words of
                [<<"PIPELINE">>, Count] ->
                    Ids = lists:seq(0, binary_to_integer(Count) - 1),
                    Replies = eredis:qp(Client, [["AW.ADD", integer_to_list(Id)] || Id <- Ids], 60000),
                    Sum = lists:sum([binary_to_integer(Added) || {ok, [Added, _, _]} <- Replies]),
                    io:format("\"~b\"~n", [Sum]);
                _ ->
                    case eredis:q(Client, Words, 60000) of
                        {ok, Reply} -> io:format("~ts~n", [shown(Reply)]);
                        {error, Error} -> io:format("error ~ts~n", [Error])
                    end
            end,
            loop(Port, Password, Clients1)
    end.

%% The library makes no difference between numbers and texts.
shown(Reply) when is_list(Reply) -> ["[", lists:join(",", [shown(Element) || Element <- Reply]), "]"];
shown(Reply) -> ["\"", Reply, "\""].
